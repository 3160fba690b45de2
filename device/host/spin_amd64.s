//go:build !noasm

#include "textflag.h"

// func spin(n int)
TEXT ·spin(SB), NOSPLIT, $0-8
	MOVQ n+0(FP), CX
	TESTQ CX, CX
	JLE  done
loop:
	PAUSE
	DECQ CX
	JNZ  loop
done:
	RET
