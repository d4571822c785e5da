#!/bin/sh
# The guest's first process: loads the driver, runs /run/command, prints its exit code, powers off.
# Marked lines enclose the output, so that the host can separate it from other console output.
export PATH=/bin HOME=/root TERM=linux
. /run/settings
$TELL

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t debugfs debugfs /sys/kernel/debug
mount -t tracefs tracefs /sys/kernel/tracing
mount -t tmpfs tmpfs /tmp

load() {
	# Only a guest of another VMM has PCI. In the lab, a module takes a tenth of a second to load.
	set -- /sys/bus/pci/devices/*
	while read -r module; do
		case $module in
		virtio_pci*) [ -e "$1" ] || continue ;;
		esac
		insmod "/lib/modules/$module" || echo "init: cannot load $module"
	done < /etc/modules
}
complaints=$(load 2>&1)

cd /root
printf '\n@@vpmu:%s begin\n' "$MARK"
[ -z "$complaints" ] || echo "$complaints"
sh /run/command < /dev/null
printf '\n@@vpmu:%s exit %s\n' "$MARK" $?
# stty waits until the console has written all output.
stty opost < /dev/console
sync
poweroff -f
