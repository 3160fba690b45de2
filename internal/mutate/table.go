package mutate

// All is every mutation that there is.
func All() []Mutation { return append([]Mutation(nil), Collectives...) }

// Collectives breaks the protocol on shared words.
var Collectives = []Mutation{
	{
		// Arrival is the count of those who have published, not what each says in its own sealed word.
		Name: "counter instead of seals", Property: "P2", File: "collectives/op.go",
		Old: "		faultpoint.Hit(faultpoint.WakeBefore)\n		c.nudge()\n",
		New: `		faultpoint.Hit(faultpoint.WakeBefore)
		if n := c.mem.Word64(c.cfg.Words, c.word+448); broken.Is("counter instead of seals") {
			for v := n.Load(); !n.CompareAndSwap(v, v+1); v = n.Load() {
			}
		}
		c.nudge()
`,
	},
	{
		Name: "counter instead of seals", Property: "P2", File: "collectives/op.go",
		Old: "			if w>>stampShift != stamp {\n				return Blocked\n			}\n			if le.Uint64",
		New: `			if n := c.mem.Word64(c.cfg.Words, c.word+448); broken.Is("counter instead of seals") {
				if n.Load() < o.Seq*uint64(v.N) {
					return Blocked
				}
				o.arrived++
				continue
			}
			if w>>stampShift != stamp {
				return Blocked
			}
			if le.Uint64`,
	},
	{
		Name: "counter instead of seals", Property: "P2", File: "collectives/decide.go",
		Old: "func (c *Comm) still(o *Op) bool {\n",
		New: "func (c *Comm) still(o *Op) bool {\n	if broken.Is(\"counter instead of seals\") {\n		return true\n	}\n",
	},
	{
		Name: "no re-check before return", Property: "P4", File: "collectives/op.go",
		Old: "		if !c.still(o) {\n			return Blocked // evicted",
		New: "		if !broken.Is(\"no re-check before return\") && !c.still(o) {\n			return Blocked // evicted",
	},
	{
		Name: "slot reused too early", Property: "P2", File: "collectives/op.go",
		Old: "if o.published == 0 && !c.reusable(o) {",
		New: `if o.published == 0 && !broken.Is("slot reused too early") && !c.reusable(o) {`,
	},
	{
		Name: "wake lost after the swap", Property: "P5", File: "collectives/comm.go",
		Old: "		c.gen.Add(1)\n		c.mem.Wake(c.gen)\n",
		New: "		if !broken.Is(\"wake lost after the swap\") {\n			c.gen.Add(1)\n			c.mem.Wake(c.gen)\n		}\n",
	},
	{
		Name: "late plain store", Property: "P2", File: "collectives/op.go",
		Old: "		c.fillChunk(o, s, k)\n		o.published++\n",
		New: "		if !broken.Is(\"late plain store\") {\n			c.fillChunk(o, s, k)\n		}\n		o.published++\n",
	},
	{
		Name: "late plain store", Property: "P2", File: "collectives/op.go",
		Old: "		s.pub.Store(w)\n",
		New: "		s.pub.Store(w)\n		if broken.Is(\"late plain store\") {\n			c.fillChunk(o, s, k)\n		}\n",
	},
	{
		Name: "nothing said before deciding", Property: "P1", File: "collectives/decide.go",
		Old: "	c.own.completing.Store(o.Seq)\n	v := c.cur.Load()\n",
		New: "	if !broken.Is(\"nothing said before deciding\") {\n		c.own.completing.Store(o.Seq)\n	}\n	v := c.cur.Load()\n",
	},
	{
		Name: "a closed word decides", Property: "P1", File: "collectives/decide.go",
		Old: "		if cl := d.closed(); cl != 0 {\n",
		New: "		if cl := d.closed(); cl != 0 && !broken.Is(\"a closed word decides\") {\n",
	},
	{
		Name: "a promise does not close", Property: "P1", File: "collectives/comm.go",
		Old: "if n := w&^0xffff | closedFor(epoch); c.dec.CompareAndSwap(w, n) {",
		New: `if n := w&^0xffff | closedFor(epoch); broken.Is("a promise does not close") || c.dec.CompareAndSwap(w, n) {`,
	},
	{
		Name: "the seal stays while the slot is overwritten", Property: "P2", File: "collectives/op.go",
		Old: "			reopen(s.pub) //",
		New: "			if !broken.Is(\"the seal stays while the slot is overwritten\") {\n				reopen(s.pub)\n			} //",
	},
	{
		Name: "no second look before sleeping", Property: "P5", File: "collectives/wait.go",
		Old: "	if check() {\n",
		New: "	if !broken.Is(\"no second look before sleeping\") && check() {\n",
	},
	{
		Name: "no version in stamps", Property: "P4", File: "collectives/layout.go",
		Old: "	return (version&(1<<14-1))<<stampSeqLen |",
		New: "	if broken.Is(\"no version in stamps\") {\n		version = 0\n	}\n	return (version&(1<<14-1))<<stampSeqLen |",
	},
}
