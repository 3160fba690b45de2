// Package chaos runs ranks as processes through a program that is drawn from a seed, does to them what can happen to
// processes, hosts and networks, and checks with package history that every promise was kept. It is `serry chaos`, and
// what the tests in pg/proof drive.
package chaos
