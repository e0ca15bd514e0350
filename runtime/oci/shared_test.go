package oci

import (
	"os"
	"strings"
	"testing"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// TestPodShares: containers of a pod share an IPC namespace and /dev/shm,
// which outlive each of them; other pods have others; nothing is left.
func TestPodShares(t *testing.T) {
	b := newBench(t)
	run := func(uid, name, script string) string {
		t.Helper()
		s := b.sh(name, script)
		s.ID = workload.ID{PodUID: uid, Container: name}
		b.start(s)
		if st := b.ended(s.ID); st.ExitCode != 0 {
			t.Errorf("%s: %+v", name, st)
		}
		if err := b.Remove(t.Context(), s.ID); err != nil {
			t.Error(err)
		}
		log, err := os.ReadFile(s.LogPath)
		if err != nil {
			t.Fatal(err)
		}
		return string(log)
	}
	ns := func(log string) string {
		_, after, _ := strings.Cut(log, "ipc:[")
		id, _, _ := strings.Cut(after, "]")
		return id
	}
	const which = "readlink /proc/self/ns/ipc; "
	one := run("pod-a", "one", which+"echo shared > /dev/shm/x; test -k /dev/shm")
	two := run("pod-a", "two", which+"cat /dev/shm/x")
	other := run("pod-b", "other", which+"test ! -e /dev/shm/x")
	if !strings.Contains(two, "shared") || ns(one) == "" || ns(one) != ns(two) || ns(one) == ns(other) {
		t.Errorf("%s%s%s", one, two, other)
	}
	for _, uid := range []string{"pod-a", "pod-b", "pod-a"} {
		if err := b.RemovePod(t.Context(), uid); err != nil {
			t.Error(err)
		}
	}
	if left, err := os.ReadDir(b.podsDir()); err != nil || len(left) > 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}
