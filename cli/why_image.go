package cli

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/dunlin-project/dunlin/manifests"
)

// nextOfImage is what to do about a container whose image cannot be used, or
// "" where that is not what it waits for: it is a module or a container image,
// and the one is not brought as the other is.
func nextOfImage(p *corev1.Pod, s *corev1.ContainerStatus, w *corev1.ContainerStateWaiting, local bool) string {
	image := s.Image
	for _, list := range [][]corev1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for i := range list {
			if image == "" && list[i].Name == s.Name {
				image = list[i].Image
			}
		}
	}
	switch {
	case w.Reason == "InvalidModule":
		return nextOfModule(p, s.Name, moduleName(image), w.Message)
	case w.Reason == "SignatureValidationFailed":
		return "sign the image with a key of its namespace's policy, or change the policy; the pod then starts by itself"
	case w.Reason == "InvalidImageName":
		return "write the image's name as the reason says, in what made the pod: it does not start with this one"
	case !strings.Contains(w.Reason, "Image"):
		return ""
	case strings.Contains(w.Message, "no such repository or tag"):
		return "correct the name in what made the pod, or push it under this one; the pod then starts by itself"
	case strings.Contains(w.Message, "needs a login"), strings.Contains(w.Message, "the login may not"):
		return "give the pod a login that may read it: a secret of type kubernetes.io/dockerconfigjson, named in imagePullSecrets"
	}
	what, bring := "image", "'dunlin import ARCHIVE'"
	if image != "" {
		bring = fmt.Sprintf("'docker save %s | dunlin import -'", image)
	}
	if manifests.IsWasmPod(&p.Spec) {
		what, bring = "module", fmt.Sprintf("'dunlin import %s FILE.wasm'", moduleName(image))
	}
	where := "this node"
	if path, ok := strings.CutPrefix(image, "file://"); ok {
		return fmt.Sprintf("put the %s at %s on node %s; the pod then starts by itself", what, path, p.Spec.NodeName)
	}
	if !local {
		where = "node " + p.Spec.NodeName
		bring += " there"
	}
	given := fmt.Sprintf("%s gives %s the %s; the pod then starts by itself", bring, where, what)
	if strings.Contains(w.Message, "cannot pull ") {
		return fmt.Sprintf("make the registry reachable from %s, or import the %s: %s", where, what, given)
	}
	return given
}

// moduleName is by what name a module is imported: without its digest.
func moduleName(image string) string {
	name, _, _ := strings.Cut(image, "@")
	if name == "" {
		return "NAME"
	}
	return name
}

// nextOfModule is what to do about a file that cannot run as it is: to try it
// again does not help, another file or another limit does.
func nextOfModule(p *corev1.Pod, container, name, message string) string {
	if strings.Contains(message, "initial memory") {
		return "to try again does not help: raise resources.limits.memory of container " + container + " in what made the pod, or build the module so that it starts with less"
	}
	do := "bring a module that can run, whole"
	for _, h := range []struct{ says, do string }{
		{"is a component", "build a core module (for wasm32-wasip1), no component"},
		{"no WASI preview 1 host has", "build it for wasm32-wasip1, without the imports that are named"},
		{"exports no _start", "build it as a program with a main function"},
		{"its _start is", "build it as a program with a main function"},
		{"native Linux program", "build it for Wasm, or run it in a container image (without runtimeClassName: wasm)"},
		{"larger than the limit", "build it smaller"},
		{"it needs more than", "build it smaller, or in several modules: to compile it takes too much memory"},
	} {
		if strings.Contains(message, h.says) {
			do = h.do
			break
		}
	}
	if path, ok := strings.CutPrefix(name, "file://"); ok {
		return fmt.Sprintf("to try the same file again does not help: %s, and put it at %s on node %s; the pod then starts by itself", do, path, p.Spec.NodeName)
	}
	return fmt.Sprintf("to try the same file again does not help: %s, and give it to node %s ('dunlin import %s FILE.wasm' there) or push it; the pod then starts by itself", do, p.Spec.NodeName, name)
}
