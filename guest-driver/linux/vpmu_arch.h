/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Architecture-specific code. No other file tests the architecture.
 */
#ifndef _VPMU_ARCH_H
#define _VPMU_ARCH_H

#include <linux/bits.h>
#include <linux/perf_regs.h>
#include <linux/types.h>

#include <asm/perf_regs.h>
#include <asm/ptrace.h>

#if defined(CONFIG_X86_64)

#include <asm/cpufeature.h>
#include <asm/perf_event.h>
#include <asm/segment.h>

/*
 * Mask of the registers that a sample can contain: all except DS, ES, FS, GS
 * and the vector registers. Bit n is perf's register number n.
 */
#define VPMU_ARCH_REGS \
	(GENMASK_ULL(PERF_REG_X86_SS, PERF_REG_X86_AX) | \
	 GENMASK_ULL(PERF_REG_X86_R15, PERF_REG_X86_R8))

/* Number of registers in VPMU_ARCH_REGS */
#define VPMU_ARCH_REGS_COUNT	20

/**
 * vpmu_arch_regs() - convert a sample's registers to struct pt_regs
 * @regs: filled in
 * @values: the registers of VPMU_ARCH_REGS, lowest number first
 * @user: the sample was taken in user mode; unused on x86, where @values
 *        contains the mode in CS
 */
static inline void vpmu_arch_regs(struct pt_regs *regs, const u64 *values, bool user)
{
	*regs = (struct pt_regs) {
		.ax = values[0],
		.bx = values[1],
		.cx = values[2],
		.dx = values[3],
		.si = values[4],
		.di = values[5],
		.bp = values[6],
		.sp = values[7],
		.ip = values[8],
		.flags = values[9],
		.cs = values[10],
		.ss = values[11],
		.r8 = values[12],
		.r9 = values[13],
		.r10 = values[14],
		.r11 = values[15],
		.r12 = values[16],
		.r13 = values[17],
		.r14 = values[18],
		.r15 = values[19],
		.orig_ax = -1,
	};
}

/**
 * vpmu_arch_no_regs() - fill struct pt_regs for a sample without registers
 * @regs: filled in
 * @ip: the sample's instruction pointer
 * @user: the sample was taken in user mode
 */
static inline void vpmu_arch_no_regs(struct pt_regs *regs, u64 ip, bool user)
{
	*regs = (struct pt_regs) {
		.ip = ip,
		.cs = user ? __USER_CS : __KERNEL_CS,
		.ss = user ? __USER_DS : __KERNEL_DS,
		.orig_ax = -1,
	};
}

/**
 * vpmu_arch_can_nest() - whether this guest can run guests of its own
 *
 * Return: true if it can.
 */
static inline bool vpmu_arch_can_nest(void)
{
	return boot_cpu_has(X86_FEATURE_VMX) || boot_cpu_has(X86_FEATURE_SVM);
}

/**
 * vpmu_arch_raw_ignored() - bits of a raw event's config that select no event
 *
 * Programs like rr copy all bits of an event select register. The kernel's own
 * drivers ignore those that it sets itself.
 *
 * Return: the mask.
 */
static inline u64 vpmu_arch_raw_ignored(void)
{
	return ARCH_PERFMON_EVENTSEL_USR | ARCH_PERFMON_EVENTSEL_OS |
	       ARCH_PERFMON_EVENTSEL_INT | ARCH_PERFMON_EVENTSEL_ENABLE;
}

#elif defined(CONFIG_ARM64)

#include <asm/virt.h>

/* X0 to X29, LR, SP and PC. perf's higher numbers are for vector registers. */
#define VPMU_ARCH_REGS		GENMASK_ULL(PERF_REG_ARM64_PC, PERF_REG_ARM64_X0)
#define VPMU_ARCH_REGS_COUNT	33

/*
 * perf has no register number for PSTATE, so the PSTATE in @regs contains only
 * the mode.
 */
static inline void vpmu_arch_no_regs(struct pt_regs *regs, u64 ip, bool user)
{
	*regs = (struct pt_regs) {
		.pc = ip,
		.pstate = user ? PSR_MODE_EL0t : PSR_MODE_EL1h,
		.syscallno = NO_SYSCALL,
	};
}

static inline void vpmu_arch_regs(struct pt_regs *regs, const u64 *values, bool user)
{
	unsigned int i;

	vpmu_arch_no_regs(regs, values[PERF_REG_ARM64_PC], user);
	for (i = 0; i <= PERF_REG_ARM64_LR; i++)
		regs->regs[i] = values[i];
	regs->sp = values[PERF_REG_ARM64_SP];
}

static inline bool vpmu_arch_can_nest(void)
{
	return is_kernel_in_hyp_mode();
}

static inline u64 vpmu_arch_raw_ignored(void)
{
	return 0;
}

#else
#error "the driver knows x86-64 and arm64"
#endif

#endif /* _VPMU_ARCH_H */
