//go:build e2e

package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/test/cluster"
)

const claimData = `apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: data}
spec:
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 16Mi}}
---
`

// journal is a pod of the example that keeps its data in the claim data.
func journal(name, more string) string {
	return fmt.Sprintf(`apiVersion: v1
kind: Pod
metadata: {name: %[1]s, labels: {app: %[1]s}}
spec:
  runtimeClassName: wasm
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 2
%[2]s  containers:
  - name: main
    image: journal.wasm
    stdin: true
    env: [{name: POD, value: %[1]s}]
    volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: data}}]
---
`, name, more)
}

// lines of a pod's log.
func lines(try func(...string) (string, error), pod string) (int, error) {
	out, err := try("logs", pod)
	return strings.Count(out, "started at"), err
}

func wantLines(try func(...string) (string, error), pod string, n int) func() error {
	return func() error {
		if got, err := lines(try, pod); err != nil || got != n {
			return fmt.Errorf("%s printed %d lines of its journal, not %d: %w", pod, got, n, err)
		}
		return nil
	}
}

func folders(dir string) (out []string) {
	entries, _ := os.ReadDir(filepath.Join(dir, "state", "claims"))
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func goneNow(get func(string, any) error, what string) func() error {
	return func() error {
		if err := get(what, &map[string]any{}); err == nil {
			return errors.New("it is there")
		} else if !strings.Contains(err.Error(), "not found") {
			return err
		}
		return nil
	}
}

// TestClaimOutlivesItsPods: a claim is bound when its first pod is placed; its
// data is there for the next pod, for a container beside, and after the server
// and its agent were killed. A claim that is in use waits for its pods; with
// it goes the folder.
func TestClaimOutlivesItsPods(t *testing.T) {
	c := cluster.New(t)
	c.Import("journal.wasm", example(t, "journal.wasm"))
	c.Apply(claimData)
	var claim corev1.PersistentVolumeClaim
	if err := c.Get("pvc/data", &claim); err != nil {
		t.Fatal(err)
	}
	if claim.Spec.StorageClassName == nil || *claim.Spec.StorageClassName != "dunlin-local" || claim.Spec.VolumeName != "" {
		t.Fatalf("claim %+v", claim.Spec)
	}
	c.Apply(journal("one", ""))
	c.WaitReady("app=one", 1)
	c.Eventually(20*time.Second, "one line", wantLines(c.Try, "one", 1))
	if err := c.Get("pvc/data", &claim); err != nil {
		t.Fatal(err)
	}
	volume := "pvc-" + string(claim.UID)
	if claim.Status.Phase != corev1.ClaimBound || claim.Spec.VolumeName != volume {
		t.Fatalf("claim %+v %+v", claim.Spec, claim.Status)
	}
	if got := folders(c.Dir); len(got) != 1 || got[0] != volume {
		t.Fatalf("folders %v", got)
	}
	c.Run("delete", "pod", "one")
	c.Kill()
	c.Start()
	c.Apply(journal("two", ""))
	c.WaitReady("app=two", 1)
	c.Eventually(20*time.Second, "two lines", wantLines(c.Try, "two", 2))

	t.Run("container", func(t *testing.T) {
		cluster.NeedContainers(t)
		c.ImportBusybox("busybox:test", nil)
		c.Apply(strings.Replace(strings.Replace(journal("three", ""), "image: journal.wasm\n    stdin: true",
			"image: busybox:test\n    imagePullPolicy: Never\n    command: [sh, -c, 'echo three started at now >> /data/journal; cat /data/journal; sleep 1000']", 1),
			"runtimeClassName: wasm", "runtimeClassName: oci", 1))
		c.WaitReady("app=three", 1)
		c.Eventually(20*time.Second, "three lines", wantLines(c.Try, "three", 3))
		c.Run("delete", "pod", "three")
	})

	c.Run("delete", "pvc", "data", "--wait=false")
	if err := c.Get("pvc/data", &claim); err != nil || claim.DeletionTimestamp == nil {
		t.Fatalf("a claim in use is gone or not going: %v", err)
	}
	if len(folders(c.Dir)) != 1 {
		t.Fatalf("folders %v", folders(c.Dir))
	}
	c.Run("delete", "pod", "two")
	c.Eventually(30*time.Second, "the claim is gone", goneNow(c.Get, "pvc/data"))
	c.Eventually(30*time.Second, "the volume is gone", goneNow(c.Get, "pv/"+volume))
	if got := folders(c.Dir); len(got) != 0 {
		t.Fatalf("folders %v", got)
	}
	dataIsRetained(t, c)
}

// dataIsRetained: of a class that retains, data stays when the claim goes, and
// when the volume goes, which then is nobody's.
func dataIsRetained(t *testing.T, c *cluster.Cluster) {
	t.Helper()
	c.Apply("apiVersion: storage.k8s.io/v1\nkind: StorageClass\nmetadata: {name: keep}\nprovisioner: dunlin.dev/local\nreclaimPolicy: Retain\nvolumeBindingMode: WaitForFirstConsumer\n")
	c.Apply(strings.Replace(claimData, "spec:", "spec:\n  storageClassName: keep", 1))
	c.Apply(journal("five", ""))
	c.WaitReady("app=five", 1)
	c.Run("delete", "pod", "five")
	c.Run("delete", "pvc", "data")
	c.Eventually(30*time.Second, "the claim is gone", goneNow(c.Get, "pvc/data"))
	kept := folders(c.Dir)
	if len(kept) != 1 {
		t.Fatalf("folders %v", kept)
	}
	c.Run("delete", "pv", kept[0])
	c.Eventually(30*time.Second, "the volume is gone", goneNow(c.Get, "pv/"+kept[0]))
	c.Eventually(30*time.Second, "it says where its data is", func() error {
		if out := c.Run("events"); !strings.Contains(out, "DataKept") || !strings.Contains(out, kept[0]+" on node e2e") {
			return errors.New(out)
		}
		return nil
	})
	if b, err := os.ReadFile(filepath.Join(c.Dir, "state", "claims", kept[0], "journal")); err != nil || !strings.Contains(string(b), "five") {
		found, _ := exec.Command("find", filepath.Join(c.Dir, "state", "claims")).Output()
		t.Errorf("the data is gone: %q, %v: %s", b, err, found)
	}
}

// TestStatefulSetClaims: each replica has a claim of its own, which its next
// pod finds again; by the retention policy those of replicas that a smaller
// size ends go, and with the set all.
func TestStatefulSetClaims(t *testing.T) {
	c := cluster.New(t)
	c.Import("journal.wasm", example(t, "journal.wasm"))
	b, err := os.ReadFile(manifest(t, "journal", "journal.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	c.Apply(strings.NewReplacer("replicas: 1", "replicas: 3", "whenDeleted: Retain", "whenDeleted: Delete").Replace(string(b)))
	c.WaitReady("app=journal", 3)
	for i := range 3 {
		c.Eventually(20*time.Second, "one line", wantLines(c.Try, fmt.Sprintf("journal-%d", i), 1))
	}
	c.Run("delete", "pod", "journal-1")
	c.Eventually(60*time.Second, "its next pod has its data", wantLines(c.Try, "journal-1", 2))
	c.WaitReady("app=journal", 3)
	c.Run("scale", "statefulset/journal", "--replicas", "1")
	for _, name := range []string{"data-journal-2", "data-journal-1"} {
		c.Eventually(60*time.Second, name+" goes", goneNow(c.Get, "pvc/"+name))
	}
	c.Run("scale", "statefulset/journal", "--replicas", "2")
	c.Eventually(60*time.Second, "it begins anew", wantLines(c.Try, "journal-1", 1))
	if n, err := lines(c.Try, "journal-0"); err != nil || n != 1 {
		t.Fatalf("journal-0: %d lines, %v", n, err)
	}
	c.Run("delete", "statefulset", "journal")
	for _, name := range []string{"data-journal-0", "data-journal-1"} {
		c.Eventually(60*time.Second, name+" goes", goneNow(c.Get, "pvc/"+name))
	}
	c.Eventually(30*time.Second, "no data is left", func() error {
		if got := folders(c.Dir); len(got) != 0 {
			return fmt.Errorf("folders %v", got)
		}
		return nil
	})
}

// TestVolumeOfANodeThatIsCutOff: a pod whose volume is on a node that is cut
// off says so; the machine boots without a server and has its data; what is
// deleted meanwhile goes when the node is back, and not before.
func TestVolumeOfANodeThatIsCutOff(t *testing.T) {
	site := cluster.NewSite(t)
	c := cluster.NewServersOn(t, 1, site.Host())
	m := site.NewMachine()
	n1, n2 := cluster.NewAgent(t, "n1", m), cluster.NewAgent(t, "n2", site.NewMachine())
	for _, a := range []*cluster.Agent{n1, n2} {
		a.Import("journal.wasm", example(t, "journal.wasm"))
		a.Start("--join", strings.TrimSpace(c.Run(0, "token", "create")))
		c.Eventually(time.Minute, a.Name+" is Ready", func() error { return c.NodeReady(0, a.Name) })
	}
	try := func(args ...string) (string, error) { return c.Try(0, args...) }
	get := func(what string, into any) error { return getJSON(c, what, into) }
	apply := func(text string) {
		t.Helper()
		if _, err := c.TryIn(0, text, "apply", "-f", "-"); err != nil {
			t.Fatal(err)
		}
	}
	apply(claimData + journal("one", "  nodeSelector: {kubernetes.io/hostname: n1}\n"))
	c.Eventually(time.Minute, "one line", wantLines(try, "one", 1))
	var claim corev1.PersistentVolumeClaim
	if err := get("pvc/data", &claim); err != nil {
		t.Fatal(err)
	}
	volume := claim.Spec.VolumeName

	m.Cut()
	n1.Stop(syscall.SIGKILL)
	for _, pid := range n1.HostPIDs() { // the machine goes, too
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	n1.Start() // an offline boot
	journalFile := filepath.Join(n1.Dir, "state", "claims", volume, "journal")
	c.Eventually(time.Minute, "the pod is started again on its data, without a server", func() error {
		b, err := os.ReadFile(journalFile)
		if n := strings.Count(string(b), "one started at"); err != nil || n != 2 {
			return fmt.Errorf("%d lines: %w", n, err)
		}
		return nil
	})

	c.Eventually(time.Minute, "the silence of n1 is noticed", func() error {
		if c.NodeReady(0, "n1") == nil {
			return errors.New("it counts as ready")
		}
		return nil
	})
	apply(journal("two", ""))
	c.Eventually(time.Minute, "a second pod says where its data is", func() error {
		out, err := try("explain", "pod", "two")
		want := "its claim data is bound to volume " + volume + " on node n1, which is Unknown since "
		if err != nil || !strings.Contains(out, want) || !strings.Contains(out, "VolumeBinding") {
			return fmt.Errorf("%s%w", out, err)
		}
		if out, err = try("describe", "pod", "two"); err != nil || !strings.Contains(out, want) {
			return fmt.Errorf("%s%w", out, err)
		}
		return nil
	})

	c.Run(0, "delete", "pod", "two", "--force")
	c.Run(0, "delete", "pod", "one", "--force")
	c.Run(0, "delete", "pvc", "data", "--wait=false")
	c.Eventually(30*time.Second, "the claim is gone", goneNow(get, "pvc/data"))
	apply(claimData) // another of the name: none of it is the old one's
	var pv corev1.PersistentVolume
	c.Eventually(30*time.Second, "the volume waits for its node", func() error {
		if err := get("pv/"+volume, &pv); err != nil || pv.DeletionTimestamp == nil {
			return fmt.Errorf("deletion %v: %w", pv.DeletionTimestamp, err)
		}
		return nil
	})
	if _, err := os.Stat(journalFile); err != nil {
		t.Fatalf("the data is gone while its pod runs: %v", err)
	}
	m.Heal()
	c.Eventually(2*time.Minute, "the volume goes when the node is back", goneNow(get, "pv/"+volume))
	if got := folders(n1.Dir); len(got) != 0 {
		t.Fatalf("folders %v", got)
	}
	apply(journal("three", "  nodeSelector: {kubernetes.io/hostname: n1}\n"))
	c.Eventually(time.Minute, "the new claim begins empty", wantLines(try, "three", 1))
}

func getJSON(c *cluster.Servers, what string, into any) error {
	kind, name, _ := strings.Cut(what, "/")
	out, err := c.Try(0, "get", kind, name, "-o", "json")
	if err != nil {
		return err
	}
	return json.Unmarshal([]byte(out), into)
}
