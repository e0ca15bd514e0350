package api

import (
	"context"
	"io"
	"net/http"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/controlplane/api/auth"
)

// verbsOf allows some verbs on anything.
type verbsOf []string

func (v verbsOf) Authorize(_ context.Context, a auth.Attributes) (bool, string) {
	return a.Subresource == "" || slices.Contains(v, a.Verb), "some verbs"
}

// refusing says what it was asked for, as a refusal.
type refusing struct{}

func (refusing) ServeStream(_ http.ResponseWriter, _ *http.Request, p *corev1.Pod, sub, container string) error {
	return apierrors.NewBadRequest(p.Name + " " + sub + " " + container)
}

func (refusing) ServeLogs(http.ResponseWriter, *http.Request, func(context.Context, io.Writer) error) error {
	return apierrors.NewBadRequest("logs")
}

// TestStreamsNeedBothVerbs: a GET, with which a WebSocket begins, is not
// enough for whoever may only get.
func TestStreamsNeedBothVerbs(t *testing.T) {
	for _, c := range []struct {
		verbs     []string
		get, post int
	}{{[]string{"get"}, 403, 403}, {[]string{"create"}, 403, 400}, {[]string{"get", "create"}, 400, 400}} {
		w := newWorld(t, func(cfg *Config) { cfg.Authorizer, cfg.Streams = verbsOf(c.verbs), refusing{} })
		w.want(201, "POST", pods, podJSON("a"))
		for _, sub := range []string{"exec", "attach", "portforward"} {
			w.want(c.get, "GET", pods+"/a/"+sub, "")
			w.want(c.post, "POST", pods+"/a/"+sub, "")
		}
	}
	w := newWorld(t, func(cfg *Config) { cfg.Streams = refusing{} })
	w.want(201, "POST", pods, podJSON("a"))
	if m := w.want(400, "POST", pods+"/a/exec", ""); at(m, "message") == "a exec " {
		t.Errorf("no container was chosen: %v", m)
	}
	if m := w.want(400, "POST", pods+"/a/portforward", ""); at(m, "message") != "a portforward " {
		t.Errorf("%v", m)
	}
	w.want(400, "POST", pods+"/a/exec?container=none", "")
	w.want(404, "POST", pods+"/none/exec", "")
	w.want(405, "DELETE", pods+"/a/exec", "")
}
