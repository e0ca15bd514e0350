package oci

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
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
	var last workload.Spec
	b.Run("agent", func(b *testing.B) {
		for i := range b.N {
			s := x.sh(fmt.Sprintf("first-%d-%d", b.N, i), "echo hello; exec sleep 1000")
			x.start(s)
			wait(s.LogPath)
			b.StopTimer()
			if last.LogPath != "" {
				if err := x.Remove(context.Background(), last.ID); err != nil {
					b.Fatal(err)
				}
			}
			last = s
			b.StartTimer()
		}
	})
	bundle := x.folder(last.ID)
	b.Run("bare", func(b *testing.B) {
		for i := range b.N {
			dir := b.TempDir()
			name, log := fmt.Sprintf("bare%d-%d", b.N, i), filepath.Join(dir, "log")
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
			b.StopTimer()
			_ = command(context.Background(), x.cfg.Programs.Runtime, root, "delete", "--force", name).Run()
			_ = x.cfg.Cgroups.Prune(name)
			b.StartTimer()
		}
	})
}
