package chaos

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/serry-project/serry/internal/faultpoint"
)

// tries is in how many steps a point has to be passed, or the order to die there is given up.
const tries = 100

// obey carries out the orders that have come, before a step:
//
//	die POINT NTH      kill yourself the Nth time that you come to the point from now on
//	stop POINT NTH     stop yourself there
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
		r.armed = ""
	}
	for {
		select {
		case line := <-r.orders:
			if err := r.carryOut(line, step); err != nil {
				r.say("cannot %s: %v", line, err)
			}
			continue
		default:
		}
		return
	}
}

func (r *rank) carryOut(line string, step int) error {
	word, rest, _ := strings.Cut(line, " ")
	switch word {
	case "die", "stop":
		var point string
		var nth int
		if _, err := fmt.Sscan(rest, &point, &nth); err != nil {
			return err
		}
		if !faultpoint.Enabled {
			return ErrNoFaultpoints
		}
		faultpoint.Disarm()
		faultpoint.Arm(point, nth, r.fate(word == "stop"))
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
