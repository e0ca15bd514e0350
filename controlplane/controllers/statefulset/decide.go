package statefulset

// replica is one ordinal of the set, with its pod if there is one.
type replica struct {
	ordinal int
	name    string
	exists  bool
	pending bool // has not started yet
	// taken: it does not exist, and another pod has its name.
	taken bool
	// current is of the update revision.
	current   bool
	leaving   bool // being deleted: its name is taken until it is gone
	over      bool // Failed or Succeeded
	ready     bool // Running and Ready
	available bool // ready for minReadySeconds
	// silent: not ready only because its node is not heard of. It may run,
	// and is left alone.
	silent bool
}

func (r *replica) unavailable() bool { return !r.available || r.leaving }

// strategy of the set, in numbers. partition is an ordinal.
type strategy struct {
	ordered        bool
	onDelete       bool
	partition      int
	maxUnavailable int
}

// actions of one round.
type actions struct {
	create []int    // ordinals
	remove []string // pods
}

// decide says what to do. replicas are the ordinals that shall be, in rising
// order; condemned those that shall go, in falling order. Pure.
//
// An ordered set makes, deletes and replaces one pod at a time, each only
// when all before it are available; a pod that is broken in an old revision
// is replaced at once, so that a bad update can be taken back. In a parallel
// set one that is not available yet is, too: it costs no availability.
func decide(replicas, condemned []replica, s strategy) actions {
	var a actions
	for i := range replicas {
		r := &replicas[i]
		stop := true
		switch {
		case r.exists && r.over:
			if !r.leaving {
				a.remove = append(a.remove, r.name)
			}
		case !r.exists:
			if !r.taken {
				a.create = append(a.create, r.ordinal)
			}
		case r.leaving:
		case r.available:
			stop = false
		case s.replaceable(r) && !r.silent && (!r.ready || !s.ordered):
			a.remove = append(a.remove, r.name)
		}
		if stop && s.ordered {
			return a
		}
	}
	if len(condemned) > 0 {
		if a.scaleDown(replicas, condemned, s); s.ordered {
			return a
		}
	}
	if !s.onDelete && len(a.create)+len(a.remove) == 0 {
		a.update(replicas, s)
	}
	return a
}

func (s strategy) replaceable(r *replica) bool {
	return !s.onDelete && !r.current && r.ordinal >= s.partition
}

// scaleDown deletes what shall go: all at once, or the highest first, each
// when those above it are gone. An unhealthy one does not wait for itself.
func (a *actions) scaleDown(replicas, condemned []replica, s strategy) {
	first := ""
	for i := range replicas {
		if replicas[i].unavailable() {
			first = replicas[i].name
			break
		}
	}
	for i := len(condemned) - 1; i >= 0 && first == ""; i-- {
		if condemned[i].unavailable() {
			first = condemned[i].name
		}
	}
	for i := range condemned {
		r := &condemned[i]
		if !s.ordered {
			if !r.leaving {
				a.remove = append(a.remove, r.name)
			}
			continue
		}
		if !r.leaving && (r.available || r.name == first) {
			a.remove = append(a.remove, r.name)
		}
		return
	}
}

// update deletes pods of old revisions from the highest ordinal down, as many
// as may be unavailable.
func (a *actions) update(replicas []replica, s strategy) {
	room := s.maxUnavailable
	for i := range replicas {
		if replicas[i].unavailable() {
			room--
		}
	}
	for i := len(replicas) - 1; i >= 0 && room > 0; i-- {
		r := &replicas[i]
		if s.replaceable(r) && r.available && !r.leaving {
			a.remove = append(a.remove, r.name)
			room--
		}
	}
}
