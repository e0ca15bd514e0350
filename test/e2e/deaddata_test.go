//go:build e2e

package e2e

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

// TestDataOfADeadNode: a StatefulSet whose pod and data are on a node that is
// cut off, and that is deleted and made anew meanwhile, says what it waits
// for; when the node is declared dead pod and claim say that the data is lost
// and how to go on, and to delete the claim is enough: it is made anew, and
// the pod starts on it elsewhere.
func TestDataOfADeadNode(t *testing.T) {
	site := cluster.NewSite(t)
	c := cluster.NewServersOn(t, 1, site.Host())
	m := map[string]*cluster.Machine{"n1": site.NewMachine(), "n2": site.NewMachine()}
	for _, name := range []string{"n1", "n2"} {
		a := cluster.NewAgent(t, name, m[name])
		a.Import("journal.wasm", example(t, "journal.wasm"))
		a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
		c.Eventually(time.Minute, name+" is Ready", func() error { return c.NodeReady(0, name) })
	}
	try := func(args ...string) (string, error) { return c.Try(0, args...) }
	says := func(what string, args []string, want ...string) {
		t.Helper()
		c.Eventually(time.Minute, what, func() error {
			out, err := try(args...)
			for _, w := range want {
				if err == nil && !strings.Contains(out, w) {
					err = fmt.Errorf("no %q in %s", w, out)
				}
			}
			return err
		})
	}
	b, err := os.ReadFile(manifest(t, "journal", "journal.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	apply := func() {
		t.Helper()
		if _, err := c.TryIn(0, string(b), "apply", "-f", "-"); err != nil {
			t.Fatal(err)
		}
	}
	apply()
	c.Eventually(time.Minute, "one line", wantLines(try, "journal-0", 1))
	var pod corev1.Pod
	if err := getJSON(c, "pod/journal-0", &pod); err != nil {
		t.Fatal(err)
	}
	node := pod.Spec.NodeName
	m[node].Cut()
	c.Eventually(time.Minute, node+" is not Ready", func() error {
		if c.NodeReady(0, node) == nil {
			return errors.New("it still is")
		}
		return nil
	})

	c.Run(0, "delete", "statefulset", "journal")
	c.Eventually(30*time.Second, "its pod is being deleted", func() error {
		if err := getJSON(c, "pod/journal-0", &pod); err != nil || pod.DeletionTimestamp == nil {
			return fmt.Errorf("%v, %w", pod.DeletionTimestamp, err)
		}
		return nil
	})
	apply()
	says("the set says whose pod has the name", []string{"describe", "statefulset", "journal"},
		"journal-0 (an earlier pod of that name, node "+node+")", "dunlin node declare-dead")
	var set appsv1.StatefulSet
	if err := getJSON(c, "statefulset/journal", &set); err != nil || set.Status.Replicas != 0 {
		t.Fatalf("%+v, %v", set.Status, err)
	}
	if out := c.Run(0, "events"); strings.Contains(out, "FailedCreate") {
		t.Errorf("events: %s", out)
	}

	c.Run(0, "node", "declare-dead", node, "--yes")
	says("the new pod says that its data is lost", []string{"describe", "pod", "journal-0"},
		"on node "+node+", which was declared dead: the data is lost with it", "'dunlin delete pvc/data-journal-0 pod/journal-0'")
	says("so does its claim", []string{"describe", "pvc", "data-journal-0"}, node+", which was declared dead", "to start empty")
	c.Run(0, "delete", "pvc", "data-journal-0", "--wait=false")
	c.Eventually(time.Minute, "it begins anew on the other node", func() error {
		if err := getJSON(c, "pod/journal-0", &pod); err != nil || pod.Spec.NodeName == node {
			return fmt.Errorf("on %q: %w", pod.Spec.NodeName, err)
		}
		return wantLines(try, "journal-0", 1)()
	})
	// The advised command ends, though both names are taken again at once.
	before := pod.UID
	c.Run(0, "delete", "pvc/data-journal-0", "pod/journal-0", "--timeout", "60s")
	c.Eventually(time.Minute, "it begins anew", func() error {
		if err := getJSON(c, "pod/journal-0", &pod); err != nil || pod.UID == before {
			return fmt.Errorf("uid %s: %w", pod.UID, err)
		}
		return wantLines(try, "journal-0", 1)()
	})
}
