package oci

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/dunlin-project/dunlin/runtime/workload"
)

// BenchmarkFirstLine is from Start to the first line in the log, beside the
// same container from the same bundle by conmon and runc alone.
func BenchmarkFirstLine(b *testing.B) {
	x := newBench(b)
	wait := func(path string) {
		t := time.NewTicker(200 * time.Microsecond)
		defer t.Stop()
		for range t.C {
			if info, err := os.Stat(path); err == nil && info.Size() > 0 {
				return
			}
		}
	}
	agent := func(i int) workload.Spec {
		s := x.sh(fmt.Sprintf("first-%d-%d", b.N, i), "echo hello; exec sleep 1000")
		x.start(s)
		wait(s.LogPath)
		return s
	}
	bare := func(bundle, dir, name string) (remove func()) {
		log := filepath.Join(dir, "log")
		var spec specs.Spec
		text, err := os.ReadFile(filepath.Join(bundle, bundleFile))
		if err == nil {
			err = json.Unmarshal(text, &spec)
		}
		if err != nil {
			b.Fatal(err)
		}
		spec.Linux.CgroupsPath = x.cfg.Cgroups.Name(name)
		if err := writeRaw(filepath.Join(dir, bundleFile), spec); err != nil {
			b.Fatal(err)
		}
		root, pid := filepath.Join(dir, "r"), filepath.Join(dir, "pid")
		c := exec.Command(x.cfg.Programs.Conmon, "--api-version", "1", "-c", name, "-u", name, "-n", name, "-r", x.cfg.Programs.Runtime,
			"--runtime-arg", "--root", "--runtime-arg", root, "-b", dir, "-p", pid, "-l", "k8s-file:"+log, "--exit-dir", dir, "--persist-dir", dir, "--socket-dir-path", dir)
		if err := c.Run(); err != nil {
			b.Fatal(err)
		}
		wait(pid)
		if out, err := command(context.Background(), x.cfg.Programs.Runtime, root, "start", name).CombinedOutput(); err != nil {
			b.Fatalf("%v: %s", err, out)
		}
		wait(log)
		return func() {
			_ = command(context.Background(), x.cfg.Programs.Runtime, root, "delete", "--force", name).Run()
			_ = x.cfg.Cgroups.Prune(name)
		}
	}
	// In turns: what else the machine does meets both alike.
	var ours, theirs []time.Duration
	for i := range b.N {
		from := time.Now()
		s := agent(i)
		ours = append(ours, time.Since(from))
		dir := b.TempDir()
		from = time.Now()
		remove := bare(x.folder(s.ID), dir, fmt.Sprintf("bare%d-%d", b.N, i))
		theirs = append(theirs, time.Since(from))
		remove()
		if err := x.Remove(context.Background(), s.ID); err != nil {
			b.Fatal(err)
		}
	}
	slices.Sort(ours)
	slices.Sort(theirs)
	a, t := ours[len(ours)/2], theirs[len(theirs)/2]
	b.ReportMetric(float64(a)/1e6, "p50-ms")
	b.ReportMetric(float64(t)/1e6, "bare-p50-ms")
	b.ReportMetric(float64(a)/float64(t), "x-bare")
}
