package auth

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

// podStore is an Objects over bound pods.
type podStore struct {
	objects
	pods []*corev1.Pod
}

func (s *podStore) record(p *corev1.Pod) *state.Record {
	return &state.Record{Header: state.Header{Key: state.Key{Kind: "Pod", Namespace: p.Namespace, Name: p.Name}, NodeName: p.Spec.NodeName}}
}

func (s *podStore) Decode(r *state.Record) (runtime.Object, error) {
	for _, p := range s.pods {
		if p.Name == r.Header.Key.Name && p.Namespace == r.Header.Key.Namespace {
			return p, nil
		}
	}
	return nil, context.Canceled
}

func (s *podStore) Reader(schema.GroupKind) state.Reader { return podReader{s: s} }

type podReader struct {
	state.Reader
	s *podStore
}

func (r podReader) Snapshot() state.Snapshot { return podSnapshot{s: r.s} }

type podSnapshot struct {
	state.Snapshot
	s *podStore
}

func (r podSnapshot) Get(k state.Key) (*state.Record, bool) {
	for _, p := range r.s.pods {
		if k.Kind == "Pod" && p.Namespace == k.Namespace && p.Name == k.Name {
			return r.s.record(p), true
		}
	}
	return nil, false
}

func (r podSnapshot) PodsOnNode(node string, f func(*state.Record) bool) {
	for _, p := range r.s.pods {
		if p.Spec.NodeName == node && !f(r.s.record(p)) {
			return
		}
	}
}

func boundPods() *podStore {
	class := "wasm"
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: "mine"}, Spec: corev1.PodSpec{
		NodeName: "n1", ServiceAccountName: "robot", RuntimeClassName: &class, PriorityClassName: "high",
		ImagePullSecrets: []corev1.LocalObjectReference{{Name: "pull"}},
		InitContainers:   []corev1.Container{{Env: []corev1.EnvVar{{Name: "x"}, {ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "init-env"}}}}}}},
		Containers: []corev1.Container{{EnvFrom: []corev1.EnvFromSource{
			{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "env-from"}}},
			{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: "secret-from"}}},
		}, Env: []corev1.EnvVar{{ValueFrom: &corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: "env"}}}}}}},
		Volumes: []corev1.Volume{
			{VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "vol"}}},
			{VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "cfg"}}}},
			{VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "claim"}}},
			{VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
				{Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "proj"}}},
				{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: corev1.LocalObjectReference{Name: "kube-root-ca.crt"}}},
			}}}},
			{VolumeSource: corev1.VolumeSource{CSI: &corev1.CSIVolumeSource{NodePublishSecretRef: &corev1.LocalObjectReference{Name: "csi"}}}},
		},
	}}
	other := p.DeepCopy()
	other.Name, other.Spec.NodeName = "theirs", "n2"
	other.Spec.Volumes[0].Secret.SecretName = "their-secret"
	return &podStore{pods: []*corev1.Pod{p, other}}
}

func TestAuthorize(t *testing.T) {
	admin := &User{Name: "root", Groups: []string{AdminsGroup, AuthenticatedGroup}}
	node := &User{Name: "system:node:n1", Groups: []string{NodesGroup, AuthenticatedGroup}}
	robot := serviceAccount("d", "robot", "u")
	anonymous := &User{Name: AnonymousUser, Groups: []string{UnauthenticatedGroup}}
	path := func(u *User, verb, p string) Attributes { return Attributes{User: u, Verb: verb, Path: p} }
	res := func(u *User, verb, group, resource, ns, name string) Attributes {
		return Attributes{User: u, Verb: verb, APIGroup: group, APIVersion: "v1", Resource: resource, Namespace: ns, Name: name}
	}
	sub := func(a Attributes, s string) Attributes { a.Subresource = s; return a }
	sel := func(a Attributes, s string) Attributes { a.Fields = fields.ParseSelectorOrDie(s); return a }
	for _, c := range []struct {
		name string
		a    Attributes
		want bool
	}{
		{"no user", Attributes{Verb: "get", Path: "/version"}, false},
		{"account reads the issuer's keys", path(robot, "get", "/openid/v1/jwks"), true},
		{"account reads the issuer's configuration", path(robot, "get", "/.well-known/openid-configuration"), true},
		{"account reads beside it", path(robot, "get", "/.well-known/other"), false},
		{"node reads the issuer's keys", path(node, "get", "/openid/v1/jwks"), false},
		{"anonymous reads the issuer's keys", path(anonymous, "get", "/openid/v1/jwks"), false},
		{"admin writes", res(admin, "delete", "apps", "deployments", "d", "x"), true},
		{"admin, any path", path(admin, "post", "/debug/pprof"), true},

		{"anonymous health", path(anonymous, "get", "/healthz"), true},
		{"anonymous live", path(anonymous, "head", "/livez"), true},
		{"anonymous ready", path(anonymous, "get", "/readyz"), true},
		{"anonymous version", path(anonymous, "get", "/version"), true},
		{"anonymous posts version", path(anonymous, "post", "/version"), false},
		{"anonymous discovery", path(anonymous, "get", "/api"), false},
		{"anonymous metrics", path(anonymous, "get", "/metrics"), false},
		{"anonymous asks about itself", res(anonymous, "create", "authorization.k8s.io", "selfsubjectaccessreviews", "", ""), false},
		{"anonymous reads", res(anonymous, "get", "", "pods", "d", "mine"), false},

		{"robot discovery", path(robot, "get", "/apis/apps/v1"), true},
		{"robot openapi", path(robot, "get", "/openapi/v3/apis/apps/v1"), true},
		{"robot metrics", path(robot, "get", "/metrics"), false},
		{"robot looks like discovery", path(robot, "get", "/apifoo"), false},
		{"robot whoami", res(robot, "create", "authentication.k8s.io", "selfsubjectreviews", "", ""), true},
		{"robot can-i", res(robot, "create", "authorization.k8s.io", "selfsubjectaccessreviews", "", ""), true},
		{"robot can-i --list", res(robot, "create", "authorization.k8s.io", "selfsubjectrulesreviews", "", ""), true},
		{"robot asks about others", res(robot, "create", "authorization.k8s.io", "subjectaccessreviews", "", ""), false},
		{"robot reviews tokens", res(robot, "create", "authentication.k8s.io", "tokenreviews", "", ""), false},
		{"robot reads", res(robot, "get", "", "pods", "d", "mine"), false},

		{"node's own", res(node, "get", "", "nodes", "", "n1"), true},
		{"another node", res(node, "get", "", "nodes", "", "n2"), false},
		{"watches its own", sel(res(node, "watch", "", "nodes", "", ""), "metadata.name=n1"), true},
		{"lists nodes", res(node, "list", "", "nodes", "", ""), false},
		{"writes its own", res(node, "update", "", "nodes", "", "n1"), false},
		{"writes its status", sub(res(node, "patch", "", "nodes", "", "n1"), "status"), false},
		{"its pod", res(node, "get", "", "pods", "d", "mine"), true},
		{"another's pod", res(node, "get", "", "pods", "d", "theirs"), false},
		{"another namespace", res(node, "get", "", "pods", "e", "mine"), false},
		{"its pods", sel(res(node, "list", "", "pods", "", ""), "spec.nodeName=n1"), true},
		{"its pods, watched", sel(res(node, "watch", "", "pods", "", ""), "spec.nodeName=n1,status.phase!=Failed"), true},
		{"not its pods", sel(res(node, "list", "", "pods", "", ""), "spec.nodeName!=n1"), false},
		{"another's pods", sel(res(node, "list", "", "pods", "", ""), "spec.nodeName=n2"), false},
		{"all pods", res(node, "list", "", "pods", "", ""), false},
		{"exec", sub(res(node, "get", "", "pods", "d", "mine"), "exec"), false},
		{"attach", sub(res(node, "create", "", "pods", "d", "mine"), "attach"), false},
		{"log", sub(res(node, "get", "", "pods", "d", "mine"), "log"), false},
		{"deletes its pod", res(node, "delete", "", "pods", "d", "mine"), false},
		{"volume secret", res(node, "get", "", "secrets", "d", "vol"), true},
		{"projected secret", res(node, "get", "", "secrets", "d", "proj"), true},
		{"env secret of an init container", res(node, "get", "", "secrets", "d", "init-env"), true},
		{"envFrom secret", res(node, "get", "", "secrets", "d", "secret-from"), true},
		{"pull secret", res(node, "get", "", "secrets", "d", "pull"), true},
		{"csi secret", res(node, "get", "", "secrets", "d", "csi"), true},
		{"watched by name", sel(res(node, "watch", "", "secrets", "d", ""), "metadata.name=vol"), true},
		{"another's secret", res(node, "get", "", "secrets", "d", "their-secret"), false},
		{"the same name elsewhere", res(node, "get", "", "secrets", "e", "vol"), false},
		{"lists secrets", res(node, "list", "", "secrets", "d", ""), false},
		{"volume config map", res(node, "get", "", "configmaps", "d", "cfg"), true},
		{"env config map", res(node, "get", "", "configmaps", "d", "env"), true},
		{"envFrom config map", res(node, "get", "", "configmaps", "d", "env-from"), true},
		{"projected config map", res(node, "get", "", "configmaps", "d", "kube-root-ca.crt"), true},
		{"a secret's name as config map", res(node, "get", "", "configmaps", "d", "vol"), false},
		{"claim", res(node, "get", "", "persistentvolumeclaims", "d", "claim"), true},
		{"account", res(node, "get", "", "serviceaccounts", "d", "robot"), true},
		{"token of the account", sub(res(node, "create", "", "serviceaccounts", "d", "robot"), "token"), false},
		{"runtime class", res(node, "get", "node.k8s.io", "runtimeclasses", "", "wasm"), true},
		{"priority class", res(node, "get", "scheduling.k8s.io", "priorityclasses", "", "high"), true},
		{"another class", res(node, "get", "node.k8s.io", "runtimeclasses", "", "oci"), false},
		{"deployments", res(node, "get", "apps", "deployments", "d", "x"), false},
		{"node without its group", res(&User{Name: "system:node:n1", Groups: []string{AuthenticatedGroup}}, "get", "", "nodes", "", "n1"), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			allowed, reason := NewAuthorizer(boundPods()).Authorize(t.Context(), c.a)
			if allowed != c.want {
				t.Errorf("allowed %v (%s)", allowed, reason)
			}
			if reason == "" {
				t.Error("no reason")
			}
		})
	}
}

type grant struct{ allow bool }

func (g grant) Authorize(context.Context, Attributes) (bool, string) { return g.allow, "by the next" }

func TestNextAuthorizers(t *testing.T) {
	robot := serviceAccount("d", "robot", "u")
	a := Attributes{User: robot, Verb: "get", Resource: "pods", Namespace: "d", Name: "x"}
	if ok, _ := NewAuthorizer(boundPods(), grant{false}, grant{true}).Authorize(t.Context(), a); !ok {
		t.Error("the second of next was not asked")
	}
	if ok, reason := NewAuthorizer(boundPods(), grant{false}).Authorize(t.Context(), a); ok || reason != "by the next" {
		t.Errorf("%v %s", ok, reason)
	}
	// Without credentials nothing else is asked.
	a.User = &User{Name: AnonymousUser, Groups: []string{UnauthenticatedGroup}}
	if ok, _ := NewAuthorizer(boundPods(), grant{true}).Authorize(t.Context(), a); ok {
		t.Error("anonymous got through")
	}
}

func TestRules(t *testing.T) {
	ruler := NewAuthorizer(boundPods()).(Ruler)
	rules, incomplete := ruler.RulesFor(t.Context(), &User{Groups: []string{AdminsGroup}}, "d")
	if len(rules) != 2 || incomplete || rules[0].Resources[0] != "*" || rules[1].NonResourceURLs[0] != "*" {
		t.Errorf("%v %v", rules, incomplete)
	}
	rules, incomplete = ruler.RulesFor(t.Context(), &User{Name: "system:node:n1", Groups: []string{NodesGroup, AuthenticatedGroup}}, "d")
	if len(rules) != 5 || !incomplete {
		t.Errorf("%v %v", rules, incomplete)
	}
	rules, _ = ruler.RulesFor(t.Context(), &User{Name: AnonymousUser}, "d")
	if len(rules) != 1 {
		t.Errorf("%v", rules)
	}
}

func TestForbiddenMessages(t *testing.T) {
	u := &User{Name: "alice"}
	for want, a := range map[string]Attributes{
		`pods is forbidden: User "alice" cannot list resource "pods" in API group "" in the namespace "d": why`:                                   {User: u, Verb: "list", Resource: "pods", Namespace: "d"},
		`deployments.apps "x" is forbidden: User "alice" cannot patch resource "deployments/scale" in API group "apps" in the namespace "d": why`: {User: u, Verb: "patch", APIGroup: "apps", Resource: "deployments", Subresource: "scale", Namespace: "d", Name: "x"},
		`nodes "n" is forbidden: User "alice" cannot get resource "nodes" in API group "" at the cluster scope: why`:                              {User: u, Verb: "get", Resource: "nodes", Name: "n"},
		`forbidden: User "alice" cannot get path "/metrics": why`:                                                                                 {User: u, Verb: "get", Path: "/metrics"},
	} {
		err := Forbidden(a, "why")
		if err.Error() != want || err.ErrStatus.Code != 403 {
			t.Errorf("\n got %s\nwant %s", err, want)
		}
	}
	if err := Unauthorized(); err.ErrStatus.Code != 401 || !strings.Contains(err.Error(), "Unauthorized") {
		t.Errorf("%v", err)
	}
}

// everything allows everything, as a role might.
type everything struct{}

func (everything) Authorize(context.Context, Attributes) (bool, string) { return true, "" }

// TestNodesNeverEnterPods: whatever a role grants.
func TestNodesNeverEnterPods(t *testing.T) {
	node := &User{Name: "system:node:n1", Groups: []string{NodesGroup, AuthenticatedGroup}}
	a := NewAuthorizer(boundPods(), everything{})
	for _, sub := range []string{"exec", "attach", "portforward"} {
		for _, verb := range []string{"get", "create"} {
			at := Attributes{User: node, Verb: verb, APIVersion: "v1", Resource: "pods", Subresource: sub, Namespace: "d", Name: "mine"}
			if ok, _ := a.Authorize(t.Context(), at); ok {
				t.Errorf("%s of pods/%s is allowed", verb, sub)
			}
			at.User = &User{Name: "someone", Groups: []string{AuthenticatedGroup}}
			if ok, reason := a.Authorize(t.Context(), at); !ok {
				t.Errorf("a role that grants %s of pods/%s means nothing: %s", verb, sub, reason)
			}
		}
	}
}
