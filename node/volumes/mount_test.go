package volumes

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
)

// TestTeardownNeverGoesThroughMounts: what a container with mount propagation
// mounted in its volume is unmounted first, in use or not; where that fails
// nothing is removed, and the next try does it.
func TestTeardownNeverGoesThroughMounts(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting needs root (CI runs it as root)")
	}
	for _, c := range []struct {
		name   string
		folder func(*testing.T, *Volumes) string
		remove func(context.Context, *Volumes) error
	}{
		{"pod", func(t *testing.T, v *Volumes) string {
			paths, err := v.Prepare(t.Context(), pod(corev1.Volume{Name: "e", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}), nil, nobody)
			if err != nil {
				t.Fatal(err)
			}
			return paths["e"]
		}, func(ctx context.Context, v *Volumes) error { return v.Teardown(ctx, podUID) }},
		{"claim", func(t *testing.T, v *Volumes) string {
			v.c.ClaimsDir = filepath.Join(t.TempDir(), "claims")
			p := filepath.Join(v.c.ClaimsDir, "pvc-"+podUID)
			if err := os.MkdirAll(p, 0o755); err != nil {
				t.Fatal(err)
			}
			return p
		}, func(ctx context.Context, v *Volumes) error { return v.RemoveLocal(ctx, "pvc-"+podUID) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := newVolumes(t)
			precious := t.TempDir() // of the same file system: its device says nothing
			if err := os.WriteFile(precious+"/keep", []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
			dir := c.folder(t, v)
			for _, d := range []string{"deep/a mount", "other"} {
				at := filepath.Join(dir, d)
				if err := os.MkdirAll(at, 0o755); err != nil {
					t.Fatal(err)
				}
				if err := unix.Mount(precious, at, "", unix.MS_BIND, ""); err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
			}
			busy, err := os.Open(filepath.Join(dir, "deep/a mount/keep"))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = busy.Close() }()
			tries := 0
			v.unmount = func(p string) error {
				if tries++; tries == 2 {
					return unix.EBUSY
				}
				return unmount(p)
			}
			if err := c.remove(t.Context(), v); !errors.Is(err, unix.EBUSY) {
				t.Errorf("a busy mount: %v", err)
			}
			if read(t, precious+"/keep") != "x" {
				t.Fatal("removed through a mount")
			}
			if err := c.remove(t.Context(), v); err != nil {
				t.Errorf("the next try: %v", err)
			}
			if read(t, precious+"/keep") != "x" {
				t.Fatal("removed through a mount")
			}
			if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("left: %v", err)
			}
		})
	}
}
