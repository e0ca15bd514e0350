package namespace

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/dunlin-project/dunlin/controlplane/controllers/fixture"
	"github.com/dunlin-project/dunlin/controlplane/registry"
)

func TestEmptiesAndFinalizes(t *testing.T) {
	w := fixture.New(t)
	configMap := schema.GroupKind{Kind: "ConfigMap"}
	w.AddNode("n")
	w.Create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "app"}})
	tpl := fixture.Template("a")
	w.Create(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "app", Name: "p", Labels: tpl.Labels}, Spec: tpl.Spec})
	w.BindAll("n")
	w.Create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "app", Name: "free"}})
	w.Create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "app", Name: "held", Finalizers: []string{"test/hold"}}})
	w.Create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "elsewhere"}})
	w.Delete(fixture.Namespace, "", "app", "")
	w.Settle(New(w.Env()))
	// The pod is still ending: what it may need stays.
	if n := len(fixture.List[*corev1.ConfigMap](w, configMap, "app")); n != 2 {
		t.Fatalf("%d ConfigMaps while a pod ends", n)
	}
	w.Report(nil)
	w.Settle(New(w.Env()))
	ns := fixture.Get[*corev1.Namespace](w, fixture.Namespace, "", "app")
	text := ""
	for _, c := range ns.Status.Conditions {
		text += string(c.Type) + "=" + string(c.Status) + " " + c.Message + "\n"
	}
	for _, want := range []string{
		"NamespaceContentRemaining=True Some resources are remaining: configmaps. has 1 resource instances",
		"NamespaceFinalizersRemaining=True Some content in the namespace has finalizers remaining: test/hold in 1 resource instances (longest: configmaps/held, since 20",
		"NamespaceDeletionContentFailure=False",
	} {
		if !strings.Contains(text, want) {
			t.Fatalf("missing %q in\n%s", want, text)
		}
	}
	// Waiting on writes nothing.
	before := w.Machine.Snapshot().ResourceVersion()
	w.Advance(time.Hour)
	w.Settle(New(w.Env()))
	if after := w.Machine.Snapshot().ResourceVersion(); after != before {
		t.Fatalf("writes while it waits: %d -> %d", before, after)
	}
	fixture.Change(w, configMap, "app", "held", registry.Main, func(cm *corev1.ConfigMap) { cm.Finalizers = nil })
	w.Settle(New(w.Env()))
	if _, err := w.Store.Get(fixture.Namespace, "", "app"); !apierrors.IsNotFound(err) {
		t.Fatalf("still there: %v", err)
	}
	if n := len(fixture.List[*corev1.ConfigMap](w, configMap, "default")); n != 1 {
		t.Fatal("another namespace was touched")
	}
}
