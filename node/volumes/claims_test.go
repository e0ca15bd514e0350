package volumes

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/dunlin-project/dunlin/manifests"
)

// bound has one claim and its volume.
type bound struct {
	Source
	claim  *corev1.PersistentVolumeClaim
	volume *corev1.PersistentVolume
}

func (b *bound) Claim(_, name string) (*corev1.PersistentVolumeClaim, bool) {
	return b.claim, b.claim != nil && b.claim.Name == name
}

func (b *bound) PersistentVolume(name string) (*corev1.PersistentVolume, bool) {
	return b.volume, b.volume != nil && b.volume.Name == name
}

func localVolume(size string) *bound {
	c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "data", UID: "u", Annotations: map[string]string{manifests.AnnotationBindCompleted: "yes"}},
		Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "pvc-u"}}
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "pvc-u", Annotations: map[string]string{manifests.AnnotationProvisionedBy: manifests.LocalProvisioner}},
		Spec: corev1.PersistentVolumeSpec{Capacity: corev1.ResourceList{"storage": resource.MustParse(size)},
			ClaimRef:               &corev1.ObjectReference{Namespace: "n", Name: "data", UID: "u"},
			PersistentVolumeSource: corev1.PersistentVolumeSource{Local: &corev1.LocalVolumeSource{Path: "/elsewhere"}}}}
	return &bound{claim: c, volume: v}
}

func claimPod() *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "n", Name: "p", UID: "pod-x"}}
	p.Spec.Volumes = []corev1.Volume{{Name: "d", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}}}
	return p
}

func withClaims(t *testing.T, dir string, limited Limits) *Volumes {
	t.Helper()
	v, err := New(Config{Dir: filepath.Join(dir, "volumes"), ClaimsDir: filepath.Join(dir, "claims"), Limited: limited, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// TestClaimsKeepTheirData: the folder is the agent's alone, is there for the
// next pod, and goes when it is told to, also when an earlier try stopped
// half-way; what is not bound to each other is never used.
func TestClaimsKeepTheirData(t *testing.T) {
	dir := t.TempDir()
	v, src := withClaims(t, dir, nil), localVolume("1Mi")
	paths, err := v.Prepare(t.Context(), claimPod(), src, nobody)
	if err != nil {
		t.Fatal(err)
	}
	p := paths["d"]
	if p != filepath.Join(dir, "claims", "pvc-u") {
		t.Fatal(p)
	}
	for path, want := range map[string]os.FileMode{filepath.Dir(p): 0o700, p: 0o777} {
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != want {
			t.Fatalf("%s: %v %v", path, st.Mode(), err)
		}
	}
	if err := os.WriteFile(filepath.Join(p, "f"), []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := v.Teardown(t.Context(), "pod-x"); err != nil {
		t.Fatal(err)
	}
	if _, err = v.Prepare(t.Context(), claimPod(), src, nobody); err != nil || read(t, filepath.Join(p, "f")) != "kept" {
		t.Fatal(err)
	}
	for name, spoil := range map[string]func(*bound){
		"another claim of the name": func(b *bound) { b.claim.UID = "u2" },
		"no volume yet":             func(b *bound) { b.claim.Spec.VolumeName = "" },
		"not complete":              func(b *bound) { b.claim.Annotations = nil },
		"going":                     func(b *bound) { b.volume.DeletionTimestamp = &metav1.Time{} },
		"a name that leads out":     func(b *bound) { b.volume.Name, b.claim.Spec.VolumeName = "../x", "../x" },
		"unknown claim":             func(b *bound) { b.claim = nil },
	} {
		b := localVolume("1Mi")
		spoil(b)
		if _, err := v.Prepare(t.Context(), claimPod(), b, nobody); err == nil {
			t.Errorf("%s: prepared", name)
		}
	}
	if err := os.MkdirAll(filepath.Join(dir, "claims", removing+"pvc-u", "half"), 0o700); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := v.RemoveLocal(t.Context(), "pvc-u"); err != nil {
			t.Fatal(err)
		}
	}
	if left, err := os.ReadDir(filepath.Join(dir, "claims")); err != nil || len(left) != 0 {
		t.Fatalf("%v %v", left, err)
	}
	for _, bad := range []string{"", "..", ".hidden", "a/b"} {
		if v.RemoveLocal(t.Context(), bad) == nil {
			t.Errorf("%q removed", bad)
		}
	}
}

// TestClaimsBelongToTheirPods: fsGroup reaches everything in the volume, and
// so does the uid of guests that have one of their own; links are left alone.
func TestClaimsBelongToTheirPods(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED, needs root to give files away (CI runs it as root)")
	}
	dir := t.TempDir()
	v, src := withClaims(t, dir, nil), localVolume("1Mi")
	outside := filepath.Join(dir, "outside")
	if err := os.WriteFile(outside, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	p := filepath.Join(dir, "claims", "pvc-u")
	for _, err := range []error{os.MkdirAll(filepath.Join(p, "sub"), 0o700), os.WriteFile(filepath.Join(p, "sub", "f"), nil, 0o600), os.Symlink(outside, filepath.Join(p, "link"))} {
		if err != nil {
			t.Fatal(err)
		}
	}
	pod, group := claimPod(), int64(4321)
	pod.Spec.SecurityContext = &corev1.PodSecurityContext{FSGroup: &group}
	if _, err := v.Prepare(t.Context(), pod, src, Facts{UID: 1234, GID: 1234}); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{p, filepath.Join(p, "sub"), filepath.Join(p, "sub", "f")} {
		st, err := os.Lstat(f)
		if err != nil {
			t.Fatal(err)
		}
		s := st.Sys().(*syscall.Stat_t)
		if s.Uid != 1234 || s.Gid != 4321 || st.Mode().Perm()&0o660 != 0o660 || st.IsDir() != (st.Mode()&os.ModeSetgid != 0) {
			t.Errorf("%s: %d:%d %v", f, s.Uid, s.Gid, st.Mode())
		}
	}
	if st, err := os.Stat(outside); err != nil || st.Sys().(*syscall.Stat_t).Gid == 4321 {
		t.Errorf("a link was followed: %v", err)
	}
}

// TestVolumesAreLimited: on ext4 with project quotas a volume takes what it
// asked for and no more, and more when it is made larger; elsewhere it is said
// that it is not limited.
func TestVolumesAreLimited(t *testing.T) {
	var said error
	v := withClaims(t, t.TempDir(), func(_ *corev1.PersistentVolume, err error) { said = err })
	if _, err := v.Prepare(t.Context(), claimPod(), localVolume("1Mi"), nobody); err != nil || !errors.Is(said, ErrNoQuota) {
		t.Fatalf("%v, said %v", err, said)
	}
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED, needs root to mount a file system (CI runs it as root)")
	}
	dir := t.TempDir()
	image, at := filepath.Join(dir, "image"), filepath.Join(dir, "at")
	steps := [][]string{{"truncate", "-s", "64M", image}, {"mkfs.ext4", "-q", "-O", "quota,project", "-E", "quotatype=prjquota", image}, {"mkdir", at}, {"mount", "-o", "loop,prjquota", image, at}}
	if ready := os.Getenv("DUNLIN_TEST_QUOTA_IMAGE"); ready != "" { // where no mkfs is
		steps[3][3], steps = ready, steps[2:]
	}
	for _, args := range steps {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Skipf("SKIPPED, no file system with project quotas can be had here: %s: %v: %s", strings.Join(args, " "), err, out)
		}
	}
	t.Cleanup(func() { _ = exec.Command("umount", at).Run() })
	v = withClaims(t, at, func(_ *corev1.PersistentVolume, err error) { said = err })
	paths, err := v.Prepare(t.Context(), claimPod(), localVolume("1Mi"), nobody)
	if err != nil || said != nil {
		t.Fatalf("%v, said %v", err, said)
	}
	f := filepath.Join(paths["d"], "sub", "f")
	if err := os.Mkdir(filepath.Dir(f), 0o700); err != nil {
		t.Fatal(err)
	}
	if out, err := fill(f, 512); err != nil {
		t.Fatalf("half of it: %v: %s", err, out)
	}
	if out, err := fill(f, 2048); err == nil {
		t.Fatalf("2 MiB in a volume of 1 MiB: %s", out)
	}
	if _, err := v.Prepare(t.Context(), claimPod(), localVolume("8Mi"), nobody); err != nil || said != nil {
		t.Fatalf("%v, said %v", err, said)
	}
	if out, err := fill(f, 2048); err != nil {
		t.Fatalf("2 MiB in a volume of 8 MiB: %v: %s", err, out)
	}
}

// fill writes a file as a user does: the kernel lets who has CAP_SYS_RESOURCE
// exceed every quota.
func fill(path string, kib int) (string, error) {
	f, err := os.Create(path)
	if err != nil {
		return "", err
	}
	defer func() { _ = f.Close() }()
	cmd := exec.Command("dd", "if=/dev/zero", "bs=1024", fmt.Sprintf("count=%d", kib))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 12345, Gid: 12345}}
	var said strings.Builder
	cmd.Stdout, cmd.Stderr, cmd.Dir = f, &said, "/"
	err = cmd.Run()
	return said.String(), err
}
