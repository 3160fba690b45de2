package fault

import (
	"bytes"
	"errors"
	"fmt"
)

// What the witness does, and why it is enough, is in the package comment.

// register is what the witness holds.
type register struct {
	Epoch    uint64
	Promised Ballot
	Accepted Ballot // zero: none
	Value    Value
}

const registerVersion = 1

func (r *register) code(c *codec) {
	c.u64(&r.Epoch)
	c.ballot(&r.Promised)
	c.ballot(&r.Accepted)
	if r.Accepted != (Ballot{}) {
		c.value(&r.Value)
	}
}

func (r register) encode() []byte {
	c := codec{b: []byte{registerVersion}}
	r.code(&c)
	return c.b
}

func parseRegister(b []byte) (r register, err error) {
	if len(b) == 0 || b[0] != registerVersion {
		return r, fmt.Errorf("fault: %d bytes that are no vote of version %d", len(b), registerVersion)
	}
	c := codec{b: b[1:], dec: true}
	r.code(&c)
	if c.err == nil && len(c.b) > 0 {
		c.fail(errTrailer)
	}
	if c.err == nil && r.Accepted != (Ballot{}) && r.Value.Epoch != r.Epoch+1 {
		c.fail(errors.New("fault: a vote for a value of another epoch"))
	}
	return r, c.err
}

// FirstVote is what the register of a new world holds: no vote. The founder stores it before the others know the world.
func FirstVote() []byte { return register{}.encode() }

// in returns the register as it is for an epoch that is not before its own.
func (r register) in(epoch uint64) register {
	if r.Epoch < epoch {
		return register{Epoch: epoch}
	}
	return r
}

// witness is what a coordinator knows of it.
type witness struct {
	held  []byte // what it held when it was last asked
	reg   register
	since Time   // since when its vote is what we lack, and nothing new comes of it; 0: something did
	again Time   // when to ask (again)
	why   string // what is wrong with it
}

// exactlyHalf says that these votes are a quorum with the vote of the witness, and are not without.
func exactlyHalf(v View, votes Set) bool {
	return 2*members(v, votes) == len(v.Members) && len(v.Members) > 0
}

// majority says that these votes are a quorum, whatever the witness says.
func majority(v View, votes Set) bool { return 2*members(v, votes) > len(v.Members) }

func members(v View, votes Set) (n int) {
	for _, p := range v.Members {
		if votes.Has(p.Slot) {
			n++
		}
	}
	return n
}

// wantsWitness says that the vote of the witness is what our ballot lacks: it has exactly half, and those who have not
// answered are out of reach, or had their time.
func (m *Machine) wantsWitness(a *attempt) bool {
	votes := m.votes(a)
	if !m.cfg.Witness || !exactlyHalf(m.view, votes) || m.enough(votes, a.witness) {
		return false
	}
	if m.t-a.since >= m.cfg.BallotTimeout {
		return true
	}
	for _, p := range m.view.Members {
		if !votes.Has(p.Slot) && !m.isDead(p.ID) && !m.isSilent(p.ID) {
			return false
		}
	}
	return true
}

// askWitness asks for the vote that our ballot lacks, if it lacks one.
func (m *Machine) askWitness(a *attempt) {
	if !m.wantsWitness(a) {
		return
	}
	w := &m.witness
	if w.since == 0 {
		w.since = m.t
	}
	if m.t < w.again {
		return
	}
	w.again = m.t + max(m.cfg.WitnessLimit/3, 1) // the answer, or our question, may be lost
	if len(w.held) == 0 {
		w.held = FirstVote()
		w.reg = register{}
	}
	r := w.reg.in(m.view.Epoch)
	if r.Epoch > m.view.Epoch && m.cfg.bug != bugWitnessLater {
		return
	}
	r.Epoch, r.Promised = m.view.Epoch, a.ballot
	if a.asking {
		r.Accepted, r.Value = a.ballot, a.value
	}
	m.emit(AskWitness{Old: w.held, New: r.encode()})
}

// onWitnessed takes the vote of the witness, or learns that a higher ballot has it.
func (m *Machine) onWitnessed(e Witnessed) {
	w := &m.witness
	switch {
	case e.Err != "":
		w.why = clip(e.Err)
		w.again = max(w.again, m.t+2*m.cfg.BallotTimeout)
		return
	case len(e.Held) == 0:
		w.why = "it has no record of this world: the world was ended there, or the record was removed or has expired"
		return
	}
	r, err := parseRegister(e.Held)
	if err != nil {
		w.why = fmt.Sprintf("what it holds cannot be read: %v", err)
		return
	}
	news := !bytes.Equal(w.held, e.Held)
	w.held, w.reg = e.Held, r
	if r.Epoch > m.view.Epoch && m.cfg.bug != bugWitnessLater {
		w.why = fmt.Sprintf("it has voted in epoch %d: the others have gone on", r.Epoch)
		return
	}
	if news { // or it does not do what it is asked
		w.since, w.again = 0, 0
	}
	if r.Epoch != m.view.Epoch {
		return // free: asked with that next
	}
	m.maxNum = max(m.maxNum, r.Promised.Num)
	a := m.att
	switch {
	case a == nil:
	case a.ballot.Less(r.Promised) && m.cfg.bug != bugWitnessAny:
		m.onNack(nack{m.head(), a.ballot, r.Promised})
	case a.asking && r.Accepted == a.ballot, !a.asking && r.Promised == a.ballot:
		a.witness = true
		if !a.asking && a.best.Less(r.Accepted) && m.cfg.bug != bugWitnessBlind {
			a.best, a.found = r.Accepted, r.Value
		}
	}
}

// witnessDue is when the witness is to be asked, or has not answered for too long; 0: it is not needed.
func (m *Machine) witnessDue() Time {
	a, w := m.att, &m.witness
	switch {
	case a == nil || !m.cfg.Witness || !exactlyHalf(m.view, m.votes(a)) || m.enough(m.votes(a), a.witness):
		return 0
	case !m.wantsWitness(a):
		return a.since + m.cfg.BallotTimeout
	case w.since == 0:
		return max(w.again, m.t)
	}
	return min(max(w.again, m.t), w.since+m.cfg.WitnessLimit)
}

// advice says what a process without a quorum can do.
func (m *Machine) advice(can Set) string {
	switch {
	case m.cfg.Witness || !exactlyHalf(m.view, can):
		return "the others may have gone on without this one, which joins them again once it reaches them"
	}
	return fmt.Sprintf("of two halves the one with the lowest rank (%d) goes on, which may have happened, and this is the other; "+
		"if that half is lost for good, start again from what was saved; with a witness either half can go on", m.view.Members[0].Slot)
}

// unwitnessed says why a half cannot decide.
func (m *Machine) unwitnessed() string {
	why := m.witness.why
	if why == "" {
		why = "no answer"
	}
	return fmt.Sprintf("this half needs the vote of the witness, and did not get it in %v (%s): see that the witness can be reached "+
		"from here, and join again; if the others are lost for good, start again from what was saved", m.cfg.WitnessLimit, why)
}

// reachesNone says that all of these are silent or dead, and some are there.
func (m *Machine) reachesNone(ms []Member) bool {
	for _, p := range ms {
		if !m.isSilent(p.ID) && !m.isDead(p.ID) {
			return false
		}
	}
	return len(ms) > 0
}
