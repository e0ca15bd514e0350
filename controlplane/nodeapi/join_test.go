package nodeapi

import (
	"context"
	"errors"
	"fmt"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// A refusal ends the agent that wants to join, so what goes away by itself is
// none: it asks again while it gets no answer.
func TestWhatOnlyDelaysAJoin(t *testing.T) {
	for _, err := range []error{
		state.ErrNoQuorum, fmt.Errorf("use token: %w", state.ErrNotLeader), context.DeadlineExceeded,
		fmt.Errorf("enroll: %w", apierrors.NewServiceUnavailable("no quorum of servers")), apierrors.NewTimeoutError("late", 1),
	} {
		if !passing(err) {
			t.Errorf("%v: refused", err)
		}
	}
	for _, err := range []error{nil, errTokenUsed, errTokenSecret, errTokenExpired, errors.New("TLS 1.3 is needed"), apierrors.NewBadRequest("name")} {
		if passing(err) {
			t.Errorf("%v: asked again for ever", err)
		}
	}
}
