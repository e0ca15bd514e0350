package volumes

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"
)

type objects struct {
	maps    map[string]*corev1.ConfigMap
	secrets map[string]*corev1.Secret
	token   string
}

func (o *objects) ConfigMap(_, name string) (*corev1.ConfigMap, bool) {
	cm, ok := o.maps[name]
	return cm, ok
}

func (o *objects) Secret(_, name string) (*corev1.Secret, bool) {
	s, ok := o.secrets[name]
	return s, ok
}

func (o *objects) Token(*corev1.Pod, *corev1.ServiceAccountTokenProjection) (string, bool) {
	return o.token, o.token != ""
}

func newVolumes(t *testing.T) *Volumes {
	t.Helper()
	v, err := New(Config{Dir: filepath.Join(t.TempDir(), "volumes"), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

var nobody = Facts{NodeName: "n1", HostIPs: []string{"192.0.2.1"}, PodIPs: []string{"10.42.0.1"}, UID: -1, GID: -1}

const podUID = "a14ff9c8-7d34-4a5e-9b5f-0123456789ab"

func pod(vols ...corev1.Volume) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: "p", UID: podUID, Labels: map[string]string{"b": "2", "a": "x\"y"}},
		Spec: corev1.PodSpec{Volumes: vols, Containers: []corev1.Container{{Name: "c", Resources: corev1.ResourceRequirements{
			Limits: corev1.ResourceList{"cpu": resource.MustParse("1500m"), "memory": resource.MustParse("64Mi")},
		}}}},
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func i32(n int32) *int32 { return &n }
func yes() *bool         { b := true; return &b }

func TestConfigMapIsSwitchedAtomically(t *testing.T) {
	v := newVolumes(t)
	src := &objects{maps: map[string]*corev1.ConfigMap{"c": {Data: map[string]string{"a": "1", "b": "1"}, BinaryData: map[string][]byte{"bin": {0, 1}}}}}
	p := pod(corev1.Volume{Name: "v", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{
		LocalObjectReference: corev1.LocalObjectReference{Name: "c"}, DefaultMode: i32(0o640),
	}}})
	paths, err := v.Prepare(t.Context(), p, src, nobody)
	if err != nil {
		t.Fatal(err)
	}
	dir := paths["v"]
	if read(t, dir+"/a") != "1" || read(t, dir+"/bin") != "\x00\x01" {
		t.Fatal("content")
	}
	if st, _ := os.Stat(dir + "/a"); st.Mode().Perm() != 0o640 {
		t.Fatalf("mode %v", st.Mode())
	}
	first, _ := os.Readlink(dir + "/..data")
	// Nothing changed: nothing is written.
	if _, err := v.Prepare(t.Context(), p, src, nobody); err != nil {
		t.Fatal(err)
	}
	if again, _ := os.Readlink(dir + "/..data"); again != first {
		t.Fatal("rewritten without a change")
	}
	src.maps["c"] = &corev1.ConfigMap{Data: map[string]string{"a": "2", "n": "2"}}
	if _, err := v.Prepare(t.Context(), p, src, nobody); err != nil {
		t.Fatal(err)
	}
	if read(t, dir+"/a") != "2" || read(t, dir+"/n") != "2" {
		t.Fatal("not updated")
	}
	if _, err := os.Lstat(dir + "/b"); err == nil {
		t.Fatal("a removed key is still there")
	}
	entries, _ := os.ReadDir(dir)
	if len(entries) != 4 { // ..1, ..data, a, n
		t.Fatalf("entries %v", entries)
	}
}

func TestItemsAndMissing(t *testing.T) {
	v := newVolumes(t)
	src := &objects{secrets: map[string]*corev1.Secret{"s": {Data: map[string][]byte{"k": []byte("v")}}}}
	vol := func(items []corev1.KeyToPath, name string, optional *bool) *corev1.Pod {
		return pod(corev1.Volume{Name: "v", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: name, Items: items, Optional: optional}}})
	}
	paths, err := v.Prepare(t.Context(), vol([]corev1.KeyToPath{{Key: "k", Path: "deep/er/file", Mode: i32(0o400)}}, "s", nil), src, nobody)
	if err != nil || read(t, paths["v"]+"/deep/er/file") != "v" {
		t.Fatal(err)
	}
	var missing *MissingError
	if _, err := v.Prepare(t.Context(), vol(nil, "none", nil), src, nobody); !errors.As(err, &missing) || missing.Name != "none" {
		t.Fatalf("missing secret: %v", err)
	}
	if _, err := v.Prepare(t.Context(), vol([]corev1.KeyToPath{{Key: "x", Path: "x"}}, "s", nil), src, nobody); !errors.As(err, &missing) || missing.Key != "x" {
		t.Fatalf("missing key: %v", err)
	}
	if _, err := v.Prepare(t.Context(), vol(nil, "none", yes()), src, nobody); err != nil {
		t.Fatalf("optional: %v", err)
	}
	for _, bad := range []string{"../x", "/etc/x", "a/../../x", "..", "..data", ""} {
		if _, err := v.Prepare(t.Context(), vol([]corev1.KeyToPath{{Key: "k", Path: bad}}, "s", nil), src, nobody); err == nil {
			t.Errorf("path %q was taken", bad)
		}
	}
}

func TestProjectedAndDownward(t *testing.T) {
	v := newVolumes(t)
	src := &objects{maps: map[string]*corev1.ConfigMap{"ca": {Data: map[string]string{"ca.crt": "PEM"}}}}
	p := pod(corev1.Volume{Name: "v", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
		{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"}},
		{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "ca"}}},
		{DownwardAPI: &corev1.DownwardAPIProjection{Items: []corev1.DownwardAPIVolumeFile{
			{Path: "ns", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.namespace"}},
			{Path: "labels", FieldRef: &corev1.ObjectFieldSelector{FieldPath: "metadata.labels"}},
			{Path: "cpu", ResourceFieldRef: &corev1.ResourceFieldSelector{ContainerName: "c", Resource: "limits.cpu"}},
			{Path: "mem", ResourceFieldRef: &corev1.ResourceFieldSelector{ContainerName: "c", Resource: "limits.memory", Divisor: resource.MustParse("1Mi")}},
		}}},
	}}}})
	paths, err := v.Prepare(t.Context(), p, src, nobody)
	if err != nil {
		t.Fatal(err)
	}
	dir := paths["v"]
	for name, want := range map[string]string{"ca.crt": "PEM", "ns": "d", "labels": "a=\"x\\\"y\"\nb=\"2\"", "cpu": "2", "mem": "64"} {
		if got := read(t, filepath.Join(dir, name)); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
	// No token yet: the pod starts without; it comes later.
	if _, err := os.Stat(dir + "/token"); err == nil {
		t.Fatal("a token out of nothing")
	}
	src.token = "jwt"
	if _, err := v.Prepare(t.Context(), p, src, nobody); err != nil || read(t, dir+"/token") != "jwt" {
		t.Fatal(err)
	}
}

func TestTeardownNeverFollowsLinks(t *testing.T) {
	v := newVolumes(t)
	precious := t.TempDir()
	if err := os.WriteFile(precious+"/keep", []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := pod(
		corev1.Volume{Name: "e", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		corev1.Volume{Name: "h", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: precious}}},
	)
	paths, err := v.Prepare(t.Context(), p, nil, nobody)
	if err != nil {
		t.Fatal(err)
	}
	if paths["h"] != precious {
		t.Fatalf("host path %q", paths["h"])
	}
	if err := os.Symlink(precious, paths["e"]+"/link"); err != nil {
		t.Fatal(err)
	}
	for range 2 { // idempotent
		if err := v.Teardown(t.Context(), podUID); err != nil {
			t.Fatal(err)
		}
	}
	if read(t, precious+"/keep") != "x" {
		t.Fatal("followed a link out")
	}
	if l, _ := v.List(); len(l) != 0 {
		t.Fatalf("left %v", l)
	}
	// The pod's folder itself replaced by a link.
	if err := os.Symlink(precious, filepath.Join(v.c.Dir, podUID)); err != nil {
		t.Fatal(err)
	}
	if err := v.Teardown(t.Context(), podUID); err != nil {
		t.Fatal(err)
	}
	if read(t, precious+"/keep") != "x" {
		t.Fatal("followed a link out")
	}
	for _, uid := range []string{"", ".", "..", "a/b", "../x"} {
		if err := v.Teardown(t.Context(), uid); err == nil {
			t.Errorf("uid %q was taken", uid)
		}
	}
}

func TestSubPath(t *testing.T) {
	vol, out := t.TempDir(), t.TempDir()
	for _, link := range [][2]string{{out, "abs"}, {"../..", "up"}, {"inside", "ok"}} {
		if err := os.Symlink(link[0], filepath.Join(vol, link[1])); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(vol+"/inside", 0o755); err != nil {
		t.Fatal(err)
	}
	for _, bad := range []string{"../x", "/etc", "a/../../b", "abs", "abs/x", "up", "up/x"} {
		if p, err := SubPath(vol, bad); err == nil {
			t.Errorf("%q led to %s", bad, p)
		}
	}
	if p, err := SubPath(vol, "ok"); err != nil || filepath.Base(p) != "inside" {
		t.Fatalf("%s %v", p, err)
	}
	if p, err := SubPath(vol, "new/deep"); err != nil || !strings.HasSuffix(p, "new/deep") {
		t.Fatalf("%s %v", p, err)
	}
}

// TestSubPathIsAsWritableAsItsVolume: who is not root writes there, too.
func TestSubPathIsAsWritableAsItsVolume(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	for _, mode := range []os.FileMode{0o777, 0o777 | os.ModeSetgid, 0o700} {
		vol := t.TempDir()
		if err := os.Chmod(vol, mode); err != nil {
			t.Fatal(err)
		}
		if _, err := SubPath(vol, "a/b/"); err != nil {
			t.Fatal(err)
		}
		for _, p := range []string{"a", "a/b"} {
			if st, err := os.Stat(filepath.Join(vol, p)); err != nil || st.Mode() != mode|os.ModeDir {
				t.Errorf("%s in a volume with %v: %v, %v", p, mode, st.Mode(), err)
			}
		}
	}
}

// TestSubPathProperty: whatever the names and links, the result is inside.
func TestSubPathProperty(t *testing.T) {
	base := t.TempDir()
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		vol := filepath.Join(base, fmt.Sprint(n))
		if err := os.Mkdir(vol, 0o755); err != nil {
			rt.Fatal(err)
		}
		part := rapid.SampledFrom([]string{"a", "b", "..", ".", "l1", "l2"})
		path := rapid.Custom(func(rt *rapid.T) string {
			return strings.Join(rapid.SliceOfN(part, 1, 4).Draw(rt, "parts"), "/")
		})
		_ = os.Mkdir(vol+"/a", 0o755)
		_ = os.Symlink(path.Draw(rt, "l1"), vol+"/l1")
		_ = os.Symlink("/"+path.Draw(rt, "l2"), vol+"/l2")
		p, err := SubPath(vol, path.Draw(rt, "sub"))
		if err == nil && p != vol && !strings.HasPrefix(p, vol+"/") {
			rt.Fatalf("led to %s", p)
		}
	})
}

func TestHostPathTypes(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(dir+"/file", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		path string
		typ  corev1.HostPathType
		ok   bool
	}{
		{dir, corev1.HostPathUnset, true}, {dir + "/none", corev1.HostPathUnset, true}, {"rel", corev1.HostPathUnset, false},
		{dir, corev1.HostPathDirectory, true}, {dir + "/file", corev1.HostPathDirectory, false},
		{dir + "/made/deep", corev1.HostPathDirectoryOrCreate, true}, {dir + "/file", corev1.HostPathDirectoryOrCreate, false},
		{dir + "/file", corev1.HostPathFile, true}, {dir + "/none", corev1.HostPathFile, false},
		{dir + "/made/f", corev1.HostPathFileOrCreate, true}, {dir + "/nodir/f", corev1.HostPathFileOrCreate, false},
		{"/dev/null", corev1.HostPathCharDev, true}, {dir, corev1.HostPathSocket, false}, {"/dev/null", corev1.HostPathBlockDev, false},
	} {
		_, err := hostPath(&corev1.HostPathVolumeSource{Path: tc.path, Type: &tc.typ})
		if (err == nil) != tc.ok {
			t.Errorf("%s as %q: %v", tc.path, tc.typ, err)
		}
	}
}

func TestMemoryAndOwnership(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: mounting tmpfs and changing owners needs root")
	}
	v := newVolumes(t)
	size := resource.MustParse("1Mi")
	p := pod(
		corev1.Volume{Name: "m", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{Medium: "Memory", SizeLimit: &size}}},
		corev1.Volume{Name: "s", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "s", DefaultMode: i32(0o400)}}},
	)
	group, user := int64(2345), int64(1234)
	p.Spec.SecurityContext = &corev1.PodSecurityContext{FSGroup: &group, RunAsUser: &user}
	src := &objects{secrets: map[string]*corev1.Secret{"s": {Data: map[string][]byte{"k": []byte("v")}}}}
	t.Cleanup(func() { _ = v.Teardown(t.Context(), podUID) })
	for range 2 { // again after an agent restart: not mounted twice
		paths, err := v.Prepare(t.Context(), p, src, nobody)
		if err != nil {
			t.Fatal(err)
		}
		if !inMemory(paths["m"]) {
			t.Fatal("not in memory")
		}
		var st syscall.Stat_t
		if err := syscall.Stat(paths["m"], &st); err != nil || st.Gid != 2345 || st.Mode&0o7777 != 0o2777 {
			t.Fatalf("emptyDir: gid %d mode %o", st.Gid, st.Mode)
		}
		if err := syscall.Stat(paths["s"]+"/k", &st); err != nil || st.Uid != 1234 || st.Gid != 2345 || st.Mode&0o777 != 0o440 {
			t.Fatalf("secret: uid %d gid %d mode %o", st.Uid, st.Gid, st.Mode)
		}
	}
	if err := os.WriteFile(filepath.Join(v.c.Dir, podUID, "m", "big"), make([]byte, 2<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("the size limit does not hold: %v", err)
	}
	if err := v.Teardown(t.Context(), podUID); err != nil {
		t.Fatal(err)
	}
	if l, _ := v.List(); len(l) != 0 {
		t.Fatalf("left %v", l)
	}
}

func TestFieldErrors(t *testing.T) {
	p := pod()
	p.Annotations = map[string]string{"x/y": "z"}
	for path, want := range map[string]string{
		"metadata.annotations['x/y']": "z", "metadata.labels['b']": "2", "metadata.uid": podUID, "status.podIP": "10.42.0.1",
		"status.hostIP": "192.0.2.1", "spec.nodeName": "n1", "status.podIPs": "10.42.0.1",
	} {
		if got, err := Field(p, path, nobody); err != nil || got != want {
			t.Errorf("%s: %q %v", path, got, err)
		}
	}
	if _, err := Field(p, "spec.containers", nobody); err == nil {
		t.Error("an unknown path was taken")
	}
	if _, err := Resource(p, "none", &corev1.ResourceFieldSelector{Resource: "limits.cpu"}, nobody); err == nil {
		t.Error("an unknown container was taken")
	}
}

// What has not the form of a pod's folder is nobody's to remove.
func TestListNamesPodsOnly(t *testing.T) {
	v := newVolumes(t)
	for _, err := range []error{
		os.Mkdir(filepath.Join(v.c.Dir, "photos"), 0o700), os.Mkdir(filepath.Join(v.c.Dir, podUID), 0o700),
		os.WriteFile(filepath.Join(v.c.Dir, "b14ff9c8-7d34-4a5e-9b5f-0123456789ab"), nil, 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if l, err := v.List(); err != nil || len(l) != 1 || l[0] != podUID {
		t.Fatalf("%v, %v", l, err)
	}
}
