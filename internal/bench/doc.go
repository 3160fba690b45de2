// Package bench measures serry as its users meet it: each measurement starts its ranks as processes, times what one rank
// sees, and holds the result against the time that the project asks for. It is the command `serry bench`; Rank is what the
// processes that it starts run.
package bench
