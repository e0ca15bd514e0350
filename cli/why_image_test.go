package cli

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestWhyItsImageIsNotThere: an image is not brought as a module is, and what
// no further try mends says what does.
func TestWhyItsImageIsNotThere(t *testing.T) {
	const pull = "ImagePullBackOff"
	const invalid = "not a WebAssembly module that can run here: "
	for _, c := range []struct {
		image, class, reason, message string
		local                         bool
		want, not                     string
	}{
		{"nosuch.example/foo:1", "", pull, "cannot pull nosuch.example/foo:1: registry nosuch.example: no address found", false,
			"make the registry reachable from node n1, or import the image: 'docker save nosuch.example/foo:1 | dunlin import -' there", "module"},
		{"nosuch.example/foo:1", "wasm", pull, "cannot pull nosuch.example/foo:1: registry nosuch.example: no address found", false,
			"make the registry reachable from node n1, or import the module: 'dunlin import nosuch.example/foo:1 FILE.wasm' there", "docker"},
		{"nosuch.example/foo:1", "", pull, "cannot pull nosuch.example/foo:1: x", true, "from this node, or import the image: 'docker save nosuch.example/foo:1 | dunlin import -' gives this node", "there"},
		{"r.example/foo:1", "", pull, "cannot pull r.example/foo:1: 404 (no such repository or tag: check the image's name)", false, "correct the name", "reachable"},
		{"r.example/foo:1", "", pull, "cannot pull r.example/foo:1: 401 (the image needs a login, or the one that was given is refused: name a secret)", false, "imagePullSecrets", "reachable"},
		{"foo:1", "", "ErrImageNeverPull", "image foo:1 is not on this node and imagePullPolicy is Never", false, "'docker save foo:1 | dunlin import -' there gives node n1 the image", "module"},
		{"app.wasm", "", pull, "module app.wasm is not on this node", false, "'dunlin import app.wasm FILE.wasm' there gives node n1 the module", "docker"},
		{"app.wasm", "", "InvalidModule", invalid + "this is a component (WASI 0.2); a core module is needed", false, "does not help: build a core module (for wasm32-wasip1)", "try it again"},
		{"app.wasm", "", "InvalidModule", invalid + "it needs what no WASI preview 1 host has: env.f", false, "without the imports that are named, and give it to node n1 ('dunlin import app.wasm FILE.wasm' there)", ""},
		{"file:///srv/app.wasm", "", "InvalidModule", invalid + "it needs what no WASI preview 1 host has: env.f", false, "without the imports that are named, and put it at /srv/app.wasm on node n1", "dunlin import"},
		{"app.wasm", "", "InvalidModule", "load module: the module's initial memory is larger than its memory limit of 16Mi", false, "raise resources.limits.memory of container c", "FILE.wasm"},
		{"app.wasm", "", "InvalidModule", invalid + "the file is empty", false, "bring a module that can run", ""},
		{"a b", "", "InvalidImageName", "x", false, "write the image's name", "by itself"},
		{"r.example/foo:1", "", "SignatureValidationFailed", "it has no signature", false, "sign the image", "tried again"},
	} {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: corev1.PodSpec{NodeName: "n1", Containers: []corev1.Container{{Name: "c", Image: c.image}}}}
		if c.class != "" {
			p.Spec.RuntimeClassName = &c.class
		}
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: c.reason, Message: c.message}}}}
		w, ok := whyPod(p, c.local)
		if !ok || !strings.Contains(w.next, c.want) || c.not != "" && strings.Contains(w.next, c.not) || strings.Contains(w.next, "tried again by itself") {
			t.Errorf("%s, %s: %s\n  next %q\n  want %q and not %q", c.image, c.reason, c.message, w.next, c.want, c.not)
		}
	}
}
