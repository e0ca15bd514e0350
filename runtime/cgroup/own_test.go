package cgroup

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

func TestParseOwn(t *testing.T) {
	for text, want := range map[string]map[string]string{
		"0::/system.slice/dunlin.service\n":                                  {"": "/system.slice/dunlin.service"},
		"4:memory:/a\n3:cpu,cpuacct:/b:c\n1:name=systemd:/d\n0::/\nbroken\n": {"memory": "/a", "cpu": "/b:c", "cpuacct": "/b:c", "name=systemd": "/d", "": "/"},
		"": {},
	} {
		if got := parseOwn(text); !maps.Equal(got, want) {
			t.Errorf("%q: %v, want %v", text, got, want)
		}
	}
}

// TestOwn: this process uses memory and time, and so does its group, where
// there is one with figures.
func TestOwn(t *testing.T) {
	s, err := Own()
	if errors.Is(err, ErrNone) {
		t.Skip("SKIPPED: this machine's control groups have no figures for this process")
	}
	if err != nil {
		t.Fatal(err)
	}
	if s.MemoryBytes != 0 && s.MemoryBytes < 1<<20 {
		t.Errorf("the group of a test uses %d bytes", s.MemoryBytes)
	}
	if s.CPUNanos == 0 && s.MemoryBytes == 0 {
		t.Errorf("%+v", s)
	}
}

// What a killed agent started in a group and did not write down is ended.
func TestEnd(t *testing.T) {
	tree := New(Config{Name: fmt.Sprintf("dunlin-end-%d", os.Getpid())})
	g, err := tree.Create("try-1/inner", Limits{})
	if err != nil {
		t.Skip("SKIPPED: " + err.Error())
	}
	t.Cleanup(func() { _ = tree.Destroy() })
	left := exec.Command("sleep", "1000")
	if err := left.Start(); err != nil {
		t.Fatal(err)
	}
	if err := g.Add(left.Process.Pid); err != nil {
		_ = left.Process.Kill()
		t.Skip("SKIPPED: no control groups here: " + err.Error())
	}
	go func() { _ = left.Wait() }() // a parent that reaps it
	if err := tree.End(t.Context(), "other"); err != nil || unix.Kill(left.Process.Pid, 0) != nil {
		t.Fatalf("another group's end took it along: %v", err)
	}
	if err := tree.End(t.Context(), "try-1"); err != nil {
		t.Fatal(err)
	}
	if err := tree.Prune("try-1"); err != nil {
		t.Fatal(err)
	}
}
