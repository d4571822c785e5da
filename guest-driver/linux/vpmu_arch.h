/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Where architectures differ: the only place that asks for one.
 */
#ifndef _VPMU_ARCH_H
#define _VPMU_ARCH_H

#include <linux/bits.h>
#include <linux/perf_regs.h>
#include <linux/types.h>

#include <asm/perf_regs.h>
#include <asm/ptrace.h>

#if defined(CONFIG_X86_64)

#include <asm/segment.h>

/* General registers that a sample can ask for: perf's numbers, but not DS, ES, FS and GS. */
#define VPMU_ARCH_REGS \
	(GENMASK_ULL(PERF_REG_X86_SS, PERF_REG_X86_AX) | \
	 GENMASK_ULL(PERF_REG_X86_R15, PERF_REG_X86_R8))

/* How many those are. */
#define VPMU_ARCH_REGS_COUNT	20

/**
 * vpmu_arch_regs() - a sample's registers as the kernel has them
 * @regs: filled in
 * @values: of VPMU_ARCH_REGS, lowest number first
 * @user: the sample is of user mode, as @values say, too
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
 * vpmu_arch_no_regs() - registers of a sample that has its address and mode alone
 * @regs: filled in
 * @ip: the address
 * @user: the mode
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

#elif defined(CONFIG_ARM64)

/* X0 to X29, LR, SP and PC: perf's numbers up to the first that is of vectors. */
#define VPMU_ARCH_REGS		GENMASK_ULL(PERF_REG_ARM64_PC, PERF_REG_ARM64_X0)
#define VPMU_ARCH_REGS_COUNT	33

/* PSTATE has no number: of it, the mode is known. */
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

#else
#error "the driver knows x86-64 and arm64"
#endif

#endif /* _VPMU_ARCH_H */
