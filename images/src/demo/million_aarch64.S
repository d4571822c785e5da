/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * An aarch64 program that executes a known number of instructions: for each word of its command line
 * (argv), a million rounds of a loop of two instructions; in addition, six instructions in total. It
 * has no C library, so nothing else runs.
 */
	.globl	_start
_start:
	ldr	x0, [sp]		/* argc */
	mov	x1, #16960
	movk	x1, #15, lsl #16	/* 1,000,000 */
	mul	x0, x0, x1
round:
	subs	x0, x0, #1
	b.ne	round
	mov	x8, #93			/* exit(0) */
	svc	#0
