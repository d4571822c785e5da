/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * An aarch64 program of known length: for each of its words (argv), a million rounds of a loop of
 * two instructions, and six more in all. Without a C library, nothing else runs.
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
