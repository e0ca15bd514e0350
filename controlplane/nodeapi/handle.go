package nodeapi

import (
	"context"

	"github.com/dunlin-project/dunlin/wire"
)

// Pulls, reports and writes of pods' news, of all nodes, that are in hand at
// once; more wait, undecoded. When everything happens at once (a large
// rollout, a site that comes back), thousands of them would compete for the
// processors with the renewals of leases and with the API. A pull computes; a
// report waits for the log, whose next entry takes all that wait.
const (
	maxPulls   = 8
	maxReports = 128
	maxWrites  = 512
)

// inTurn waits for a place in slots.
func inTurn(ctx context.Context, slots chan struct{}, f func() (wire.Message, error)) (wire.Message, error) {
	select {
	case slots <- struct{}{}:
		defer func() { <-slots }()
		return f()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

type sessionHandler struct {
	s    *Server
	sess *session
}

// Handle implements wire.Handler.
func (h sessionHandler) Handle(ctx context.Context, t wire.Type, body []byte) (wire.Message, error) {
	switch t {
	case wire.TypeLeaseRequest:
		return handle(body, func(r *wire.LeaseRequest) (wire.Message, error) { return h.s.lease(h.sess, r), nil })
	case wire.TypePullRequest:
		return inTurn(ctx, h.s.pulling, func() (wire.Message, error) {
			// An assignment made of an old view would bring back what was deleted.
			if err := h.s.current(); err != nil {
				return nil, err
			}
			return handle(body, func(r *wire.PullRequest) (wire.Message, error) { return h.s.assign.pull(ctx, h.sess, r) })
		})
	case wire.TypeServicesRequest:
		return inTurn(ctx, h.s.pulling, func() (wire.Message, error) {
			if err := h.s.current(); err != nil {
				return nil, err
			}
			return handle(body, h.s.pullServices)
		})
	case wire.TypeReport:
		return inTurn(ctx, h.s.reports, func() (wire.Message, error) {
			// A pod that is not in an old view would be called unknown, and a
			// healthy pod stopped.
			if err := h.s.current(); err != nil {
				return nil, err
			}
			return handle(body, func(r *wire.Report) (wire.Message, error) { return h.s.report(ctx, h.sess, r) })
		})
	case wire.TypeRenewRequest:
		return handle(body, func(r *wire.RenewRequest) (wire.Message, error) { return h.s.renew(h.sess, r), nil })
	case wire.TypeTimeRequest:
		return handle(body, func(*wire.TimeRequest) (wire.Message, error) {
			return &wire.TimeReply{UnixMilli: h.s.cfg.Clock.Now().UnixMilli(), Trusted: h.s.clockOK() == nil}, nil
		})
	}
	return nil, &wire.Fault{Code: wire.FaultUnsupported, Message: t.String() + " is not served here"}
}

func handle[T any, PT interface {
	*T
	wire.Message
}](body []byte, f func(PT) (wire.Message, error)) (wire.Message, error) {
	m := PT(new(T))
	if err := wire.Unmarshal(body, m); err != nil {
		return nil, err
	}
	return f(m)
}
