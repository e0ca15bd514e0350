// Package node is the agent: it keeps the assignment that the control plane
// gave it in its own database, and drives the runtimes until what runs is
// what was assigned, with or without a network.
package node

import (
	"context"
	"io"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/wire"
	"github.com/dunlin-project/dunlin/wire/mux"
)

// Link is the agent's one outbound connection to the control plane,
// implemented by node/link. Every call fails fast with ErrOffline while cut
// off; reconnecting, with jitter, is the link's own business.
type Link interface {
	Pull(ctx context.Context, r wire.PullRequest) (*wire.Assignment, error)
	Report(ctx context.Context, r *wire.Report) (*wire.ReportReply, error)
	// Hints fires (coalesced) on a nudge, a newer generation in a lease reply,
	// and a (re)connect: pull again, report everything not acknowledged.
	Hints() <-chan struct{}
	// Connected says whether the last lease was acknowledged in time.
	Connected() bool
}

// StreamServer serves what the control plane asks the node to open.
type StreamServer interface {
	// Logs writes the container's log as text. It returns when done or, with
	// Follow, when ctx ends or the container has ended.
	Logs(ctx context.Context, namespace, pod, uid string, o *corev1.PodLogOptions, w io.Writer) error
}

// SessionServer serves exec, attach and portforward.
type SessionServer interface {
	// Session refuses the request with an apierrors.APIStatus, or calls begin
	// once and serves what the control plane opens on it until that is over or
	// ctx ends.
	Session(ctx context.Context, r *wire.StreamRequest, begin func() (*mux.Mux, error)) error
}
