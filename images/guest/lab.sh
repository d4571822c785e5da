#!/bin/sh
# The lab's first process: loads KVM, runs the VMM, prints its log and report.
export PATH=/bin HOME=/root TERM=linux
set -a
. /run/settings
set +a

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tracefs tracefs /sys/kernel/tracing
mount -t tmpfs tmpfs /tmp
# Load KVM only once the kernel has refined the TSC's frequency. KVM keeps the frequency that it
# reads when it is loaded. If the kernel then refines its own value by 250 ppm, later vCPUs have no
# TSC frequency that KVM can use, and all their timers come late.
clocksource=/sys/devices/system/clocksource/clocksource0/current_clocksource
while [ "$(cat $clocksource)" = tsc-early ]; do
	sleep 0.02
done
# An emulated PAUSE takes a microsecond and more. With KVM's defaults, a vCPU would spin for a whole time slice.
pause_filter='pause_filter_count=64 pause_filter_count_grow=0 pause_filter_thresh=65535'
while read -r module; do
	case $module in
	kvm_amd.*) options=$pause_filter ;;
	*) options= ;;
	esac
	insmod "/lib/modules/$module" $options
done < /etc/modules
echo -1 > /proc/sys/kernel/perf_event_paranoid
# Don't throttle samples: emulation is slow, and the kernel would conclude that samples cost too
# much time.
echo 0 > /proc/sys/kernel/perf_cpu_time_max_percent

cd /root
# The guest's console output already has carriage returns.
stty -onlcr < /dev/console
sh /run/job < /dev/null 2> /tmp/log
printf '\n@@vpmu:%s vmm %s\n' "$MARK" $?
printf '\n@@vpmu:%s log\n' "$MARK"
cat /tmp/log
printf '\n@@vpmu:%s report\n' "$MARK"
cat /tmp/report 2> /dev/null
printf '\n@@vpmu:%s end\n' "$MARK"
# stty waits until the console has written all output.
stty opost < /dev/console
$END
