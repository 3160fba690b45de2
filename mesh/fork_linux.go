package mesh

import "golang.org/x/sys/unix"

// dontFork keeps a mapping out of forked children, which would keep the memory alive and can not use it.
func dontFork(b []byte) { _ = unix.Madvise(b, unix.MADV_DONTFORK) }
