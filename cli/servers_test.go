package cli

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane"
	"github.com/dunlin-project/dunlin/controlplane/api"
)

// answering is a world in which a path has one answer.
func answering(t *testing.T, path string, code int, body any) *world {
	t.Helper()
	return newWorld(t, func(c *api.Config) {
		c.Extra = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != path {
				w.WriteHeader(http.StatusNotFound)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(code)
			_ = json.NewEncoder(w).Encode(body)
		})
	})
}

// TestRemoveServerWithoutQuorum: while nobody leads, a removal waits, says that
// it does, and in the end says for how long, and what helps when most servers
// are lost.
func TestRemoveServerWithoutQuorum(t *testing.T) {
	nobody := metav1.Status{Status: metav1.StatusFailure, Code: http.StatusServiceUnavailable, Message: "no server leads at the moment: try again"}
	nobody.Kind, nobody.APIVersion = "Status", "v1"
	answering(t, controlplane.RemoveServerPath, http.StatusServiceUnavailable, nobody)
	cl, err := (&app{errw: io.Discard}).client()
	if err != nil {
		t.Fatal(err)
	}
	waits := 0
	_, err = removeServer(t.Context(), cl, "s2", 1500*time.Millisecond, func() { waits++ })
	if err == nil || waits != 1 {
		t.Fatalf("waited %d times: %v", waits, err)
	}
	for _, want := range []string{"not removed within 1.5s", "no server leads at the moment", "'dunlin server recover'"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("no %q in %v", want, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	_, err = removeServer(ctx, cl, "s2", time.Minute, cancel)
	if err == nil || strings.Contains(err.Error(), "recover") {
		t.Errorf("interrupted: %v", err)
	}
}
