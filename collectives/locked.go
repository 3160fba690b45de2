package collectives

// Locked says that somebody holds a lock of the Comm: in a simulation one who was stopped between two accesses to memory,
// so that nobody else of the process can run.
func (c *Comm) Locked() bool {
	if !c.mu.TryLock() {
		return true
	}
	c.mu.Unlock()
	return false
}

// Locked is Comm.Locked for the Arena.
func (a *Arena) Locked() bool {
	if !a.mu.TryLock() {
		return true
	}
	a.mu.Unlock()
	return false
}
