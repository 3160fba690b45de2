// Package faultpoint names the places at which a process may die worst, so that
// a test can make it die at each of them. Built without the tag "faultpoint",
// [Hit] is an empty function that the compiler removes.
package faultpoint

// The points. "mid" is after half of the bytes.
const (
	PublishBefore    = "publish.before"
	PublishMid       = "publish.mid"
	SealBefore       = "seal.before"
	SealAfter        = "seal.after"
	DecideBefore     = "decide.before"
	DecideAfter      = "decide.after"
	WakeBefore       = "wake.before"
	PullMid          = "pull.mid"
	PullAfter        = "pull.after"
	ReturnBefore     = "return.before"
	EPDispatchEncode = "ep.dispatch.encode"
	EPDispatchWait   = "ep.dispatch.wait"
	EPCombineEncode  = "ep.combine.encode"
	EPCombineWait    = "ep.combine.wait"
	AgentPrepare     = "agent.prepare"
	AgentPromise     = "agent.promise"
	AgentAccept      = "agent.accept"
	AgentCommit      = "agent.commit"
	BoundaryEnter    = "boundary.enter"
	BoundaryStop     = "boundary.stop"
	JoinHello        = "join.hello"
	JoinWelcome      = "join.welcome"
	TCPFrameMid      = "tcp.frame.mid"
	NewGroup         = "newgroup"
)

// All lists the points in the order above.
func All() []string {
	return []string{
		PublishBefore, PublishMid, SealBefore, SealAfter, DecideBefore, DecideAfter, WakeBefore,
		PullMid, PullAfter, ReturnBefore,
		EPDispatchEncode, EPDispatchWait, EPCombineEncode, EPCombineWait,
		AgentPrepare, AgentPromise, AgentAccept, AgentCommit,
		BoundaryEnter, BoundaryStop, JoinHello, JoinWelcome, TCPFrameMid, NewGroup,
	}
}
