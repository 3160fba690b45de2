package host

// Ident says which process this is and what it can share with others. Two
// processes are on one host if their BootID is equal; they reach each other by
// abstract unix sockets if NetNS is equal too, and their PIDs mean the same if
// PidNS is. (PID, StartTime) within BootID and PidNS never comes twice.
type Ident struct {
	BootID    string // of the running kernel, random
	Hostname  string
	PID       int
	StartTime uint64 // of the process, in clock ticks since boot
	NetNS     uint64 // inode numbers of the namespaces
	PidNS     uint64
	IpcNS     uint64
}
