/* SPDX-License-Identifier: Apache-2.0 OR MIT */
/*
 * An x86-64 program that executes a known number of instructions: for each word of its command line
 * (argv), a million rounds of a loop of two instructions; in addition, four instructions in total. It
 * has no C library, so nothing else runs.
 */
	.globl	_start
_start:
	imul	$1000000, (%rsp), %rax	/* argc */
round:
	sub	$1, %rax
	jnz	round
	mov	$60, %eax		/* exit(0) */
	xor	%edi, %edi
	syscall
	.section .note.GNU-stack, "", @progbits
