package node

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// TestLogs: which attempt is read, what is refused and how, and that only
// the attempt before the current one is kept.
func TestLogs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		b.rt.onStart = func(s workload.Spec, st *workload.State) error {
			line := "2026-01-01T00:00:00.000000000Z stdout F attempt " + string(rune('0'+s.ID.Attempt)) + "\n"
			if err := os.WriteFile(s.LogPath, []byte(line), 0o600); err != nil {
				return err
			}
			time.AfterFunc(time.Second, func() { b.rt.end(s.ID, 1, "Trap") })
			return nil
		}
		b.link.put("Pod", wasmPod("a"))
		b.start()
		defer b.stop()
		get := func(o corev1.PodLogOptions) (string, error) {
			var w bytes.Buffer
			err := b.agent.Logs(t.Context(), "default", "a", "uid-a", &o, &w)
			return w.String(), err
		}
		b.after(500 * time.Millisecond)
		if s, err := get(corev1.PodLogOptions{}); err != nil || s != "attempt 0\n" {
			t.Fatalf("%q %v", s, err)
		}
		if _, err := get(corev1.PodLogOptions{Previous: true}); !apierrors.IsBadRequest(err) || !strings.Contains(err.Error(), "previous terminated container \"main\" in pod \"a\" not found") {
			t.Fatalf("previous of the first: %v", err)
		}
		if _, err := get(corev1.PodLogOptions{Container: "none"}); !apierrors.IsBadRequest(err) {
			t.Fatalf("no such container: %v", err)
		}
		if err := b.agent.Logs(t.Context(), "default", "zz", "uid-zz", &corev1.PodLogOptions{}, &bytes.Buffer{}); !apierrors.IsNotFound(err) {
			t.Fatalf("no such pod: %v", err)
		}
		b.after(13 * time.Second) // the third attempt ended too: back-off
		for _, previous := range []bool{false, true} {
			if s, err := get(corev1.PodLogOptions{Previous: previous}); err != nil || s != "attempt 2\n" {
				t.Fatalf("in back-off, previous %v: %q %v", previous, s, err)
			}
		}
		b.after(20 * time.Second) // the fourth runs or ended
		files, _ := filepath.Glob(filepath.Join(b.c.StateDir, "logs", "default_a_uid-a", "main", "*"))
		if len(files) > 3 {
			t.Fatalf("logs kept: %v", files)
		}
		b.link.put("Pod", deleted(wasmPod("a"), 0))
		b.after(5 * time.Second)
		if left, _ := os.ReadDir(filepath.Join(b.c.StateDir, "logs")); len(left) != 0 {
			t.Fatalf("logs left: %v", left)
		}
	})
}

// TestSweepTakesItsOwn: only what has the form of a pod's folder of logs goes
// when no pod has it.
func TestSweepTakesItsOwn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBed(t)
		const uid = "a14ff9c8-7d34-4a5e-9b5f-0123456789ab"
		dir := filepath.Join(b.c.StateDir, "logs")
		file := filepath.Join(dir, "default_b_"+uid)
		for _, err := range []error{
			os.MkdirAll(filepath.Join(dir, "default_a_"+uid, "main"), 0o755), os.Mkdir(filepath.Join(dir, "my_photos"), 0o755),
			os.Mkdir(filepath.Join(dir, "of_my_cat"), 0o755), os.WriteFile(filepath.Join(dir, "logs_test.go"), nil, 0o600), os.WriteFile(file, nil, 0o600),
		} {
			if err != nil {
				t.Fatal(err)
			}
		}
		b.start()
		defer b.stop()
		b.after(time.Minute)
		var left []string
		entries, err := os.ReadDir(dir)
		for _, e := range entries {
			left = append(left, e.Name())
		}
		if want := []string{"default_b_" + uid, "logs_test.go", "my_photos", "of_my_cat"}; err != nil || !slices.Equal(left, want) {
			t.Fatalf("left %v, want %v (%v)", left, want, err)
		}
	})
}
