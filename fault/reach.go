package fault

// reach answers who reaches whom, from what the members say about each other.

// unlink returns whom to drop so that the rest is mutually connected, in the order in which they are dropped. silent
// gives, for a member that has reported, whom it does not hear. A link is broken when both of its ends say so: one that
// merely does not answer is not judged here. Of those with a broken link the one with the fewest working links goes (the
// highest slot on a tie); for this count one end's word is enough.
func unlink(members Set, silent map[int]Set) (drop []int) {
	slots := members.Slots()
	mute := func(a, b int) bool { s, ok := silent[a]; return ok && s.Has(b) }
	any := false
	for _, a := range slots {
		s := silent[a]
		for b := s.Next(0); b >= 0 && !any; b = s.Next(b + 1) {
			any = mute(b, a) && members.Has(b)
		}
	}
	for any {
		worst, least := -1, 0
		for _, a := range slots {
			if !members.Has(a) {
				continue
			}
			broken, working := false, 0
			for _, b := range slots {
				if a == b || !members.Has(b) {
					continue
				}
				ab, ba := mute(a, b), mute(b, a)
				if ab && ba {
					broken = true
				}
				if !ab && !ba {
					working++
				}
			}
			if broken && (worst < 0 || working <= least) {
				worst, least = a, working
			}
		}
		if worst < 0 {
			return drop
		}
		drop = append(drop, worst)
		members.Del(worst)
	}
	return nil
}

// quorum says whether these votes can decide what follows the view: more than half of its members, or exactly half with
// the lowest slot among them. Two quorums of a view always have a member in common.
func quorum(v View, votes Set) bool {
	n := len(v.Members)
	if n == 0 {
		return false
	}
	k := 0
	for _, p := range v.Members {
		if votes.Has(p.Slot) {
			k++
		}
	}
	return 2*k > n || 2*k == n && votes.Has(v.Members[0].Slot)
}

// reachable is who could vote for the view as far as this process sees: those that are not silent, and the dead that
// have a living, audible process on their host.
func reachable(v View, self ID, dead, silent func(ID) bool) (s Set) {
	for _, p := range v.Members {
		if p.ID == self || !dead(p.ID) && !silent(p.ID) {
			s.Add(p.Slot)
			continue
		}
		if !dead(p.ID) {
			continue
		}
		for _, q := range v.Members {
			if q.Host == p.Host && (q.ID == self || !dead(q.ID) && !silent(q.ID)) {
				s.Add(p.Slot)
				break
			}
		}
	}
	return s
}

func none(s Set) bool { return s == Set{} }
