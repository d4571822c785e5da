#!/bin/sh
# The lab's first process: makes /dev/kvm appear, runs the VMM, hands over what it left.
export PATH=/bin HOME=/root TERM=linux
set -a
. /run/settings
set +a

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mount -t tracefs tracefs /sys/kernel/tracing
mount -t tmpfs tmpfs /tmp
# KVM keeps the TSC's frequency as it finds it, and leaves a vCPU that is made after the kernel
# has refined it by 250 ppm without a TSC to compare with: all its timers would come late.
clocksource=/sys/devices/system/clocksource/clocksource0/current_clocksource
while [ "$(cat $clocksource)" = tsc-early ]; do
	sleep 0.02
done
while read -r module; do
	insmod "/lib/modules/$module"
done < /etc/modules
echo -1 > /proc/sys/kernel/perf_event_paranoid
# The kernel takes the emulation's slowness for the cost of samples, and would throttle them.
echo 0 > /proc/sys/kernel/perf_cpu_time_max_percent

cd /root
# The guest's console comes with carriage returns of its own.
stty -onlcr < /dev/console
sh /run/job < /dev/null 2> /tmp/log
printf '\n@@vpmu:%s vmm %s\n' "$MARK" $?
printf '\n@@vpmu:%s log\n' "$MARK"
cat /tmp/log
printf '\n@@vpmu:%s report\n' "$MARK"
cat /tmp/report 2> /dev/null
printf '\n@@vpmu:%s end\n' "$MARK"
# Setting the terminal waits until all output is out.
stty opost < /dev/console
$END
