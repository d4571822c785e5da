#!/bin/sh
# The guest's first process: loads the driver, runs /run/command, says how it ended, powers off.
# What it says goes between marked lines, so that the host can tell it from other console output.
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
	while read -r module; do
		insmod "/lib/modules/$module" || echo "init: cannot load $module"
	done < /etc/modules
}
complaints=$(load 2>&1)

cd /root
printf '\n@@vpmu:%s begin\n' "$MARK"
[ -z "$complaints" ] || echo "$complaints"
sh /run/command < /dev/null
printf '\n@@vpmu:%s exit %s\n' "$MARK" $?
# Setting the terminal waits until all output is out.
stty opost < /dev/console
sync
poweroff -f
