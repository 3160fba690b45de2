package chaos

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/serry-project/serry/internal/faultpoint"
	"github.com/serry-project/serry/internal/history"
)

// tries is in how many steps a point has to be passed, or the order to die there is given up.
const tries = 100

// obey carries out the orders that have come, before a step:
//
//	die POINT NTH [OP] kill yourself the Nth time that you come to the point, from now on or in an operation of that name
//	stop POINT NTH [OP] stop yourself there
//	late DURATION      be late in this step
//	reset N            close the Nth of your TCP connections
//	garble N           write garbage into it
//	pace DURATION      sleep so long between steps from now on
//	touch BYTES        take so much memory; at once, beside the program
//	onepeer            kill yourself in the next all_to_all when you have sent to exactly one peer
//	leave              leave the world
//	stats              say what this process holds: "stats JSON"
//	invite             say what a newcomer can be given: "invite TEXT"
func (r *rank) obey(step int) {
	if r.armed != "" && step >= r.until {
		faultpoint.Disarm()
		r.say("missed %s", r.armed)
		r.armed, r.aim = "", aim{}
	}
	for {
		select {
		case line := <-r.orders:
			if err := r.carryOut(line, step); err != nil {
				r.say("cannot %s: %v", line, err)
			}
			if strings.HasPrefix(line, "late ") {
				return // once in a step
			}
			continue
		default:
		}
		return
	}
}

// aim is where a rank is to die, or to stop.
type aim struct {
	point string
	nth   int
	op    history.Op // in this one; 0: anywhere
	stop  bool
}

// take arms the point for an operation that begins, if it is the one.
func (r *rank) take(op history.Op) {
	if a := r.aim; a.op != 0 && a.op == op {
		faultpoint.Arm(a.point, a.nth, r.fate(a.stop))
	}
}

// miss says that the operation has ended without it: the next one of its kind will do.
func (r *rank) miss(op history.Op) {
	if a := r.aim; a.op != 0 && a.op == op {
		faultpoint.Disarm()
	}
}

func (r *rank) carryOut(line string, step int) error {
	word, rest, _ := strings.Cut(line, " ")
	switch word {
	case "die", "stop":
		a := aim{stop: word == "stop"}
		var op string
		if n, err := fmt.Sscan(rest, &a.point, &a.nth, &op); n < 2 {
			return err
		}
		if !faultpoint.Enabled {
			return ErrNoFaultpoints
		}
		faultpoint.Disarm()
		if a.op = history.ParseOp(op); op == "" {
			faultpoint.Arm(a.point, a.nth, r.fate(a.stop))
		} else if a.op == 0 {
			return fmt.Errorf("chaos: no operation has the name %q", op)
		}
		r.aim = a
		r.armed, r.until = line, step+tries
	case "late", "pace":
		d, err := time.ParseDuration(rest)
		if err != nil {
			return err
		}
		if word == "pace" {
			r.Pause = d
		} else {
			time.Sleep(d)
		}
	case "reset", "garble":
		var n int
		if _, err := fmt.Sscan(rest, &n); err != nil {
			return err
		}
		if err := hurtSocket(n, word == "garble"); err != nil {
			return err
		}
	case "leave":
		r.leaves = true
	case "onepeer":
		r.faults.armed.Store(true)
	case "stats":
		b, err := json.Marshal(holds())
		if err != nil {
			return err
		}
		r.say("stats %s", b)
	case "invite":
		r.say("invite %s", r.w.Invite())
	default:
		return fmt.Errorf("chaos: the order %q is unknown", line)
	}
	r.say("did %s", line)
	return nil
}
