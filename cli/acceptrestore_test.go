package cli

import (
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/controlplane"
	"github.com/dunlin-project/dunlin/controlplane/api"
	"github.com/dunlin-project/dunlin/controlplane/registry"
	"github.com/dunlin-project/dunlin/manifests"
)

// accept-restore tells nodes that hold something, and no others, once, by the
// number of the epoch.
func TestAcceptRestore(t *testing.T) {
	w := newWorld(t, func(c *api.Config) {
		c.Extra = http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
			if r.URL.Path == controlplane.ServersPath {
				_, _ = rw.Write([]byte(`{"epoch":7}`))
			}
		})
	})
	for name, status := range map[string]corev1.ConditionStatus{"n1": corev1.ConditionTrue, "n2": corev1.ConditionFalse, "n3": corev1.ConditionTrue} {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
		n.Status.Conditions = []corev1.NodeCondition{{Type: manifests.ConditionHeldAfterRestore, Status: status, Message: "what is held"}}
		if _, err := w.reg.Create(t.Context(), n, registry.WriteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	refused := func(want string, args ...string) {
		t.Helper()
		if code, _, errs := run(append([]string{"node", "accept-restore"}, args...)...); code == 0 || !strings.Contains(errs, want) {
			t.Errorf("%v: exit %d: %s", args, code, errs)
		}
	}
	refused("give the names of nodes, or --all")
	refused("give the names of nodes, or --all", "n1", "--all")
	refused("node n2 holds nothing", "n2")
	refused("not found", "nowhere")
	if out := w.ok("node", "accept-restore", "n1"); out != "node/n1 accepted: it follows the restored state\n" {
		t.Error(out)
	}
	if out := w.ok("node", "accept-restore", "--all"); out != "node/n1 already accepted: it follows once it is connected\nnode/n3 accepted: it follows the restored state\n" {
		t.Error(out)
	}
	if out := w.ok("get", "node", "n3", "-o", "jsonpath={.metadata.annotations}"); !strings.Contains(out, `"dunlin.dev/accept-restore":"7"`) {
		t.Error(out)
	}
	if out := w.ok("__complete", "node", "accept-restore", "n1", ""); !strings.HasPrefix(out, "n3\n") {
		t.Error(out)
	}
	if out := w.ok("get", "nodes"); strings.Count(out, "HeldAfterRestore") != 2 {
		t.Error(out)
	}
}
