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

// What is wrong with the wish for a token is said by the flags that it has.
func TestTokenOptionsRefused(t *testing.T) {
	for want, o := range map[string]TokenOptions{
		"--node-name=Bad_Name is no name for a node; bad-name would be one":                       {Name: "Bad_Name"},
		"--node-name=___ is no name for a node: small letters, digits, '-' and '.' are wanted":    {Name: "___"},
		"--node-name=a is the name of one node, and --uses=3 lets 3 join: leave one of them out":  {Name: "a", Uses: 3},
		"--server gives away the keys of the cluster, to one server: leave --uses=2 out":          {Server: true, Uses: 2},
		"--server makes one for a server, and --node-name=x is for a node: leave one of them out": {Name: "x", Server: true},
	} {
		if err := o.check(); !errors.Is(err, ErrTokenOptions) || err.Error() != "no join token was made: "+want {
			t.Errorf("%+v: %v", o, err)
		}
	}
	for _, o := range []TokenOptions{{}, {Uses: 3}, {Server: true}, {Name: "shop-12"}, {Name: "shop-12", Uses: 1}} {
		if err := o.check(); err != nil {
			t.Errorf("%+v: %v", o, err)
		}
	}
}
