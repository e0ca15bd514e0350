package cli

import (
	"fmt"
	"strings"
	"testing"
)

func nodePort(name string, port int) string {
	return fmt.Sprintf("apiVersion: v1\nkind: Service\nmetadata: {name: %s}\nspec:\n  type: NodePort\n  ports:\n  - {port: 80, nodePort: %d}\n---\n", name, port)
}

// A dry run finds node ports and addresses that others have, in the cluster and
// in the files; an apply finds those of the files before it changes anything.
func TestDryRunFindsConflicts(t *testing.T) {
	w := newWorld(t)
	w.ok("apply", "-f", w.file("a.yaml", nodePort("a", 30080)))
	for _, flag := range []string{"--dry-run", "--dry-run=server", "--dry-run=true"} {
		if code, _, errs := run("apply", flag, "-f", w.file("b.yaml", nodePort("b", 30080))); code != 1 || !strings.Contains(errs, "b.yaml:7: ") || !strings.Contains(errs, "already allocated") {
			t.Errorf("%s: exit %d: %s", flag, code, errs)
		}
	}
	both := w.file("both.yaml", nodePort("c", 30081)+nodePort("d", 30081))
	for _, flag := range []string{"--dry-run=server", "--dry-run=none"} {
		if code, out, errs := run("apply", flag, "-f", both); code != 1 || out != "" || !strings.Contains(errs, `both.yaml:15: Service "d" is invalid: spec.ports[0].nodePort: 30081 is that of Service "c", too`) {
			t.Errorf("%s: exit %d: %s%s", flag, code, out, errs)
		}
	}
	// One that gives a port up before another one takes it.
	w.ok("apply", "-f", w.file("swap.yaml", nodePort("a", 30090)+nodePort("b", 30080)))
	if out := w.ok("get", "svc", "-o", "name"); strings.Contains(out, "/c") || !strings.Contains(out, "service/b") {
		t.Error(out)
	}
}

// What can be said without a server is said without one.
func TestDryRunOfTheClient(t *testing.T) {
	w := newWorld(t)
	w.http.Close()
	good := w.file("good.yaml", nodePort("a", 30080)+cm("one", "app: x", "1"))
	out := w.ok("apply", "--dry-run=client", "-f", good)
	if !strings.Contains(out, "service/a checked (dry run") || !strings.Contains(out, "configmap/one checked") {
		t.Error(out)
	}
	if out := w.ok("apply", "--dry-run=client", "-o", "name", "-f", good); out != "service/a\nconfigmap/one\n" {
		t.Error(out)
	}
	bad := w.file("bad.yaml", strings.Replace(nodePort("a", 30080), "port: 80", "port: 80000", 1))
	if code, _, errs := run("apply", "--dry-run=client", "-f", bad); code != 1 || !strings.Contains(errs, "bad.yaml:7: ") {
		t.Errorf("exit %d: %s", code, errs)
	}
	if code, _, errs := run("apply", "--dry-run=server", "-f", good); code == 0 {
		t.Error("there is no server", errs)
	}
}
