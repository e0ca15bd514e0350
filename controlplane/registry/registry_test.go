package registry

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/dunlin-project/dunlin/controlplane/state"
)

var (
	podGK = schema.GroupKind{Kind: "Pod"}
	nsGK  = schema.GroupKind{Kind: "Namespace"}
	svcGK = schema.GroupKind{Kind: "Service"}
	cmGK  = schema.GroupKind{Kind: "ConfigMap"}
)

// world is a registry over the real state machine, without Raft.
type world struct {
	*Registry
	t       testing.TB
	machine *state.Machine
	local   *state.Local
	soft    *state.Soft
}

func newWorld(t testing.TB, set ...func(*Config)) *world {
	t.Helper()
	w := &world{t: t, machine: state.NewMachine(state.Options{}), soft: state.NewSoft(1, state.SoftOptions{})}
	w.local = state.NewLocal(w.machine)
	cfg := Config{Durable: w.machine, Proposer: w.local, Soft: w.soft, SoftProposer: LocalSoft(w.soft, w.local)}
	for _, f := range set {
		f(&cfg)
	}
	r, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	w.Registry = r
	w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "default"}})
	return w
}

func (w *world) create(obj runtime.Object) runtime.Object {
	w.t.Helper()
	out, err := w.Create(context.Background(), obj, WriteOptions{})
	if err != nil {
		w.t.Fatalf("create: %v", err)
	}
	return out
}

func newPod(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", Labels: map[string]string{"app": "a"}},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "file:///a.wasm"}}},
	}
}

func as[T runtime.Object](t testing.TB, obj runtime.Object, err error) T {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	out, ok := obj.(T)
	if !ok {
		t.Fatalf("got %T", obj)
	}
	return out
}

func TestCreateSetsWhatOnlyTheServerMay(t *testing.T) {
	w := newWorld(t)
	in := newPod("a")
	in.Generation, in.UID = 7, "mine"
	in.Status.Phase = corev1.PodRunning
	now := metav1.Now()
	in.DeletionTimestamp = &now
	p := as[*corev1.Pod](t, w.create(in), nil)
	if p.UID == "" || p.UID == "mine" || p.Generation != 1 || p.CreationTimestamp.IsZero() || p.DeletionTimestamp != nil {
		t.Errorf("metadata: %+v", p.ObjectMeta)
	}
	if p.Status.Phase != corev1.PodPending || p.ResourceVersion == "" {
		t.Errorf("status %+v, resourceVersion %q", p.Status, p.ResourceVersion)
	}
	if in.UID != "mine" {
		t.Error("the caller's object was modified")
	}
	if _, err := w.Create(context.Background(), newPod("a"), WriteOptions{}); !apierrors.IsAlreadyExists(err) {
		t.Errorf("second create: %v", err)
	}
	other := newPod("a")
	other.Namespace = "nowhere"
	if _, err := w.Create(context.Background(), other, WriteOptions{}); !apierrors.IsNotFound(err) || err.Error() != `namespaces "nowhere" not found` {
		t.Errorf("missing namespace: %v", err)
	}
	gen := newPod("")
	gen.GenerateName = "job-"
	g := as[*corev1.Pod](t, w.create(gen), nil)
	if len(g.Name) != len("job-")+5 {
		t.Errorf("generated name %q", g.Name)
	}
	cm := as[*corev1.ConfigMap](t, w.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "default"}}), nil)
	if cm.Generation != 0 {
		t.Errorf("a ConfigMap has no generation, got %d", cm.Generation)
	}
}

func TestDryRunWritesNothing(t *testing.T) {
	w := newWorld(t)
	before := w.machine.Snapshot().ResourceVersion()
	out, err := w.Create(context.Background(), newPod("a"), WriteOptions{DryRun: true})
	p := as[*corev1.Pod](t, out, err)
	if p.UID == "" || w.machine.Snapshot().ResourceVersion() != before {
		t.Errorf("uid %q, version %d after %d", p.UID, w.machine.Snapshot().ResourceVersion(), before)
	}
	w.create(newPod("a"))
	before = w.machine.Snapshot().ResourceVersion()
	if _, gone, err := w.Delete(context.Background(), podGK, "default", "a", DeleteOptions{DryRun: true}); err != nil || !gone {
		t.Errorf("dry-run delete: gone %v, %v", gone, err)
	}
	if _, err := w.Update(context.Background(), podGK, "default", "a", Main, label("x", "y"), WriteOptions{DryRun: true}); err != nil {
		t.Error(err)
	}
	if w.machine.Snapshot().ResourceVersion() != before {
		t.Error("a dry run wrote")
	}
}

func label(k, v string) Mutate {
	return func(o runtime.Object) (runtime.Object, error) {
		m := o.(metav1.Object)
		l := m.GetLabels()
		if l == nil {
			l = map[string]string{}
		}
		l[k] = v
		m.SetLabels(l)
		return o, nil
	}
}

func TestUpdateRules(t *testing.T) {
	w, ctx := newWorld(t), context.Background()
	p := as[*corev1.Pod](t, w.create(newPod("a")), nil)

	t.Run("no-op writes nothing", func(t *testing.T) {
		before := w.machine.Snapshot().ResourceVersion()
		out, err := w.Update(ctx, podGK, "default", "a", Main, func(o runtime.Object) (runtime.Object, error) { return o, nil }, WriteOptions{})
		if q := as[*corev1.Pod](t, out, err); q.ResourceVersion != p.ResourceVersion || w.machine.Snapshot().ResourceVersion() != before {
			t.Errorf("version %s after %s", q.ResourceVersion, p.ResourceVersion)
		}
	})
	t.Run("stale version conflicts", func(t *testing.T) {
		as[*corev1.Pod](t, must(w.Update(ctx, podGK, "default", "a", Main, label("n", "1"), WriteOptions{})), nil)
		_, err := w.Update(ctx, podGK, "default", "a", Main, func(runtime.Object) (runtime.Object, error) {
			return p.DeepCopy(), nil // carries the old version
		}, WriteOptions{})
		if !apierrors.IsConflict(err) {
			t.Errorf("got %v", err)
		}
		want := `Operation cannot be fulfilled on pods "a": the object has been modified; please apply your changes to the latest version and try again`
		if err != nil && err.Error() != want {
			t.Errorf("message %q", err)
		}
	})
	t.Run("another uid conflicts", func(t *testing.T) {
		_, err := w.Update(ctx, podGK, "default", "a", Main, func(o runtime.Object) (runtime.Object, error) {
			o.(*corev1.Pod).UID = "other"
			return o, nil
		}, WriteOptions{})
		if !apierrors.IsConflict(err) {
			t.Errorf("got %v", err)
		}
	})
	t.Run("spec and status are apart", func(t *testing.T) {
		cur := as[*corev1.Pod](t, must(w.Get(podGK, "default", "a")), nil)
		out, err := w.Update(ctx, podGK, "default", "a", Status, func(o runtime.Object) (runtime.Object, error) {
			q := o.(*corev1.Pod)
			q.Spec.Containers[0].Image = "evil"
			q.Labels["evil"] = "yes"
			q.Status.Phase = corev1.PodRunning
			return q, nil
		}, WriteOptions{})
		q := as[*corev1.Pod](t, out, err)
		if q.Spec.Containers[0].Image != "file:///a.wasm" || q.Labels["evil"] != "" || q.Status.Phase != corev1.PodRunning || q.Generation != cur.Generation {
			t.Errorf("status write: image %q labels %v phase %s generation %d", q.Spec.Containers[0].Image, q.Labels, q.Status.Phase, q.Generation)
		}
		out, err = w.Update(ctx, podGK, "default", "a", Main, func(o runtime.Object) (runtime.Object, error) {
			q := o.(*corev1.Pod)
			q.Spec.Containers[0].Image = "file:///b.wasm"
			q.Status.Phase = corev1.PodFailed
			return q, nil
		}, WriteOptions{})
		q = as[*corev1.Pod](t, out, err)
		if q.Status.Phase != corev1.PodRunning || q.Generation != cur.Generation+1 {
			t.Errorf("spec write: phase %s generation %d", q.Status.Phase, q.Generation)
		}
	})
	t.Run("lost races are retried", func(t *testing.T) {
		runs := 0
		out, err := w.Update(ctx, podGK, "default", "a", Main, func(o runtime.Object) (runtime.Object, error) {
			if runs++; runs == 1 {
				must(w.Update(ctx, podGK, "default", "a", Main, label("other", "writer"), WriteOptions{}))
			}
			return label("mine", "too")(o)
		}, WriteOptions{})
		q := as[*corev1.Pod](t, out, err)
		if runs != 2 || q.Labels["other"] != "writer" || q.Labels["mine"] != "too" {
			t.Errorf("%d runs, labels %v", runs, q.Labels)
		}
	})
	t.Run("old term is fenced", func(t *testing.T) {
		_, err := w.Update(ctx, podGK, "default", "a", Main, label("x", "y"), WriteOptions{Term: 99})
		if !apierrors.IsServiceUnavailable(err) {
			t.Errorf("got %v", err)
		}
	})
}

func must(o runtime.Object, err error) runtime.Object {
	if err != nil {
		panic(err)
	}
	return o
}

func TestPodDeletionIsTwoPhased(t *testing.T) {
	w, ctx := newWorld(t), context.Background()
	node := as[*corev1.Node](t, w.create(newNode("n1")), nil)
	p := as[*corev1.Pod](t, w.create(newPod("a")), nil)
	errs, err := w.Bind(ctx, []PodBinding{{Namespace: "default", Name: "a", PodUID: p.UID, Node: "n1", NodeUID: node.UID}}, 0)
	if err != nil || errs[0] != nil {
		t.Fatal(err, errs)
	}
	obj, gone, err := w.Delete(ctx, podGK, "default", "a", DeleteOptions{})
	if gone {
		t.Fatal("a bound pod went at once")
	}
	q := as[*corev1.Pod](t, obj, err)
	if q.DeletionTimestamp == nil || q.DeletionGracePeriodSeconds == nil || *q.DeletionGracePeriodSeconds != 30 || q.Generation != 2 || q.Spec.NodeName != "n1" {
		t.Errorf("marked: %+v", q.ObjectMeta)
	}
	longer, shorter, zero := int64(60), int64(5), int64(0)
	obj, _, err = w.Delete(ctx, podGK, "default", "a", DeleteOptions{GracePeriodSeconds: &longer})
	if q := as[*corev1.Pod](t, obj, err); *q.DeletionGracePeriodSeconds != 30 {
		t.Errorf("grace was lengthened to %d", *q.DeletionGracePeriodSeconds)
	}
	obj, _, err = w.Delete(ctx, podGK, "default", "a", DeleteOptions{GracePeriodSeconds: &shorter})
	if q2 := as[*corev1.Pod](t, obj, err); *q2.DeletionGracePeriodSeconds != 5 || q.DeletionTimestamp.Sub(q2.DeletionTimestamp.Time).Seconds() != 25 {
		t.Errorf("shortened to %d at %v", *q2.DeletionGracePeriodSeconds, q2.DeletionTimestamp)
	}
	wrong := types.UID("wrong")
	if _, _, err := w.Delete(ctx, podGK, "default", "a", DeleteOptions{GracePeriodSeconds: &zero, UID: &wrong}); !apierrors.IsConflict(err) {
		t.Errorf("uid precondition: %v", err)
	}
	if _, gone, err := w.Delete(ctx, podGK, "default", "a", DeleteOptions{GracePeriodSeconds: &zero, UID: &p.UID}); err != nil || !gone {
		t.Errorf("agent's delete: gone %v, %v", gone, err)
	}
	if _, err := w.Get(podGK, "default", "a"); !apierrors.IsNotFound(err) {
		t.Errorf("after: %v", err)
	}
	w.create(newPod("unbound"))
	if _, gone, err := w.Delete(ctx, podGK, "default", "unbound", DeleteOptions{}); err != nil || !gone {
		t.Errorf("unbound pod: gone %v, %v", gone, err)
	}
}

func newNode(name string) *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{
			"cpu": quantity("2"), "memory": quantity("1Gi"), "pods": quantity("10"),
		}},
	}
}

// Who asks for another propagation than was asked before, or than the object's
// own finalizers say, takes the collector's finalizers away: nothing is waited
// for any more, and the object goes at once.
func TestDeletionWithoutItsDependents(t *testing.T) {
	w, ctx := newWorld(t), context.Background()
	for name, before := range map[string]func(){
		"asked for in the foreground": func() {
			_, gone, err := w.Delete(ctx, cmGK, "default", "c", DeleteOptions{Propagation: metav1.DeletePropagationForeground})
			if err != nil || gone {
				t.Fatal(gone, err)
			}
		},
		"not asked for": func() {},
	} {
		w.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "default", Finalizers: []string{metav1.FinalizerDeleteDependents}}})
		before()
		obj, gone, err := w.Delete(ctx, cmGK, "default", "c", DeleteOptions{Propagation: metav1.DeletePropagationBackground})
		if err != nil || !gone || obj == nil {
			t.Fatalf("%s: gone %v, %v", name, gone, err)
		}
		if _, err := w.Get(cmGK, "default", "c"); !apierrors.IsNotFound(err) {
			t.Fatalf("%s: %v", name, err)
		}
	}
}

func TestFinalizersHoldAnObject(t *testing.T) {
	w, ctx := newWorld(t), context.Background()
	w.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "default", Finalizers: []string{"example.com/x"}}})
	obj, gone, err := w.Delete(ctx, cmGK, "default", "c", DeleteOptions{Propagation: metav1.DeletePropagationForeground})
	c := as[*corev1.ConfigMap](t, obj, err)
	if gone || c.DeletionTimestamp == nil || fmt.Sprint(c.Finalizers) != "[example.com/x foregroundDeletion]" {
		t.Fatalf("gone %v: %+v", gone, c.ObjectMeta)
	}
	clearAll := func(o runtime.Object) (runtime.Object, error) {
		o.(*corev1.ConfigMap).Finalizers = nil
		return o, nil
	}
	if _, err := w.Update(ctx, cmGK, "default", "c", Main, clearAll, WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Get(cmGK, "default", "c"); !apierrors.IsNotFound(err) {
		t.Errorf("after the last finalizer: %v", err)
	}
}

func TestNamespaceDeletion(t *testing.T) {
	w, ctx := newWorld(t), context.Background()
	ns := as[*corev1.Namespace](t, w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "n"}}), nil)
	if ns.Status.Phase != corev1.NamespaceActive || ns.Labels[corev1.LabelMetadataName] != "n" || len(ns.Spec.Finalizers) != 1 {
		t.Fatalf("created %+v", ns)
	}
	obj, gone, err := w.Delete(ctx, nsGK, "", "n", DeleteOptions{})
	if ns = as[*corev1.Namespace](t, obj, err); gone || ns.Status.Phase != corev1.NamespaceTerminating {
		t.Fatalf("deleted: gone %v %+v", gone, ns.Status)
	}
	p := newPod("late")
	p.Namespace = "n"
	_, err = w.Create(ctx, p, WriteOptions{})
	if !apierrors.IsForbidden(err) || !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		t.Errorf("create in a terminating namespace: %v", err)
	}
	_, err = w.Update(ctx, nsGK, "", "n", Finalize, func(o runtime.Object) (runtime.Object, error) {
		o.(*corev1.Namespace).Spec.Finalizers = nil
		return o, nil
	}, WriteOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Get(nsGK, "", "n"); !apierrors.IsNotFound(err) {
		t.Errorf("after finalize: %v", err)
	}
}

func TestServiceAllocation(t *testing.T) {
	w, ctx := newWorld(t), context.Background()
	svc := func(name string, typ corev1.ServiceType, ip string, nodePort int32) *corev1.Service {
		return &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
			Spec: corev1.ServiceSpec{Type: typ, ClusterIP: ip, Selector: map[string]string{"a": "b"},
				Ports: []corev1.ServicePort{{Port: 80, NodePort: nodePort}}},
		}
	}
	seen := map[string]bool{}
	for i := range 50 {
		s := as[*corev1.Service](t, w.create(svc(fmt.Sprintf("s%d", i), corev1.ServiceTypeNodePort, "", 0)), nil)
		if s.Spec.ClusterIP == "" || seen[s.Spec.ClusterIP] || s.Spec.ClusterIPs[0] != s.Spec.ClusterIP || s.Spec.Ports[0].NodePort == 0 || len(s.Spec.IPFamilies) != 1 {
			t.Fatalf("allocated %+v", s.Spec)
		}
		seen[s.Spec.ClusterIP] = true
	}
	fixed := as[*corev1.Service](t, w.create(svc("fixed", corev1.ServiceTypeClusterIP, "10.43.0.10", 0)), nil)
	if _, err := w.Create(ctx, svc("taken", corev1.ServiceTypeClusterIP, "10.43.0.10", 0), WriteOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("taken address: %v", err)
	}
	// A dry run sees that, too, and what another one's node port is; not its own.
	if _, err := w.Create(ctx, svc("taken", corev1.ServiceTypeClusterIP, "10.43.0.10", 0), WriteOptions{DryRun: true}); !apierrors.IsInvalid(err) {
		t.Errorf("taken address, dry run: %v", err)
	}
	port := as[*corev1.Service](t, w.create(svc("port", corev1.ServiceTypeNodePort, "", 0)), nil).Spec.Ports[0].NodePort
	if _, err := w.Create(ctx, svc("taken", corev1.ServiceTypeNodePort, "", port), WriteOptions{DryRun: true}); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "provided port is already allocated") {
		t.Errorf("taken port, dry run: %v", err)
	}
	for name, ok := range map[string]bool{"port": true, "s2": false} {
		_, err := w.Update(ctx, svcGK, "default", name, Main, func(o runtime.Object) (runtime.Object, error) {
			o.(*corev1.Service).Spec.Ports[0].NodePort = port
			o.(*corev1.Service).Spec.Ports[0].TargetPort.IntVal = 8080
			return o, nil
		}, WriteOptions{DryRun: true})
		if (err == nil) != ok {
			t.Errorf("dry-run update of %s: %v", name, err)
		}
	}
	// The same family twice is one complaint, about what was written.
	twice := svc("twice", corev1.ServiceTypeClusterIP, "", 0)
	twice.Spec.IPFamilies = []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv4Protocol}
	if _, err := w.Create(ctx, twice, WriteOptions{}); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.ipFamilies[1]: Duplicate value") || strings.Contains(err.Error(), "dual-stack") || strings.Contains(err.Error(), "clusterIP") {
		t.Errorf("a family twice: %v", err)
	}
	if _, err := w.Create(ctx, svc("far", corev1.ServiceTypeClusterIP, "192.0.2.1", 0), WriteOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("address out of range: %v", err)
	}
	// Another address is refused, whichever of the two fields names it.
	for name, change := range map[string]func(*corev1.ServiceSpec){
		"clusterIP":  func(s *corev1.ServiceSpec) { s.ClusterIP = "10.43.0.99" },
		"clusterIPs": func(s *corev1.ServiceSpec) { s.ClusterIP, s.ClusterIPs = "10.43.0.99", []string{"10.43.0.99"} },
	} {
		_, err := w.Update(ctx, svcGK, "default", "s3", Main, func(o runtime.Object) (runtime.Object, error) {
			n := o.DeepCopyObject().(*corev1.Service)
			change(&n.Spec)
			return n, nil
		}, WriteOptions{})
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "may not change once set") {
			t.Errorf("another %s: %v", name, err)
		}
	}
	// A client that sends what it once wrote keeps what it was given.
	out, err := w.Update(ctx, svcGK, "default", "s1", Main, func(o runtime.Object) (runtime.Object, error) {
		n := svc("s1", corev1.ServiceTypeNodePort, "", 0)
		n.Spec.Ports[0].TargetPort.IntVal = 8080
		return n, nil
	}, WriteOptions{})
	s := as[*corev1.Service](t, out, err)
	if s.Spec.ClusterIP == "" || s.Spec.Ports[0].NodePort == 0 {
		t.Errorf("lost its addresses: %+v", s.Spec)
	}
	if _, gone, err := w.Delete(ctx, svcGK, "default", fixed.Name, DeleteOptions{}); err != nil || !gone {
		t.Fatal(gone, err)
	}
	w.create(svc("again", corev1.ServiceTypeClusterIP, "10.43.0.10", 0))
	// Who changes the type need not know what the old one needed.
	for _, typ := range []corev1.ServiceType{corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeExternalName} {
		out, err := w.Update(ctx, svcGK, "default", "s2", Main, func(o runtime.Object) (runtime.Object, error) {
			n := o.DeepCopyObject().(*corev1.Service)
			if n.Spec.Type = typ; typ == corev1.ServiceTypeExternalName {
				n.Spec.ExternalName = "example.org"
			}
			return n, nil
		}, WriteOptions{})
		if err != nil {
			t.Fatalf("to %s: %v", typ, err)
		}
		s := as[*corev1.Service](t, out, nil)
		if open := typ == corev1.ServiceTypeLoadBalancer || typ == corev1.ServiceTypeNodePort; open != (s.Spec.ExternalTrafficPolicy != "") {
			t.Errorf("%s: externalTrafficPolicy %q", typ, s.Spec.ExternalTrafficPolicy)
		}
		if is := typ == corev1.ServiceTypeLoadBalancer; is != (s.Spec.AllocateLoadBalancerNodePorts != nil) {
			t.Errorf("%s: allocateLoadBalancerNodePorts %v", typ, s.Spec.AllocateLoadBalancerNodePorts)
		}
	}
}

func TestEventsAreSoftAndHaveTwoNames(t *testing.T) {
	w, ctx := newWorld(t), context.Background()
	before := w.machine.Snapshot().ResourceVersion()
	w.create(&corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: "e", Namespace: "default"},
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Name: "a", Namespace: "default"},
		Message:        "hello", Reason: "Said", Type: "Normal",
	})
	if w.machine.Snapshot().ResourceVersion() != before {
		t.Error("an event reached the durable store")
	}
	got, err := w.List(schema.GroupKind{Group: "events.k8s.io", Kind: "Event"}, "default", nil, fields.OneTermEqualSelector("regarding.name", "a"))
	if err != nil || len(got) != 1 {
		t.Fatalf("%d events, %v", len(got), err)
	}
	got, err = w.List(schema.GroupKind{Kind: "Event"}, "", labels.Everything(), fields.OneTermEqualSelector("involvedObject.name", "a"))
	if err != nil || len(got) != 1 || got[0].(*corev1.Event).Message != "hello" {
		t.Fatalf("%v, %v", got, err)
	}
	if _, err := w.Update(ctx, schema.GroupKind{Kind: "Event"}, "default", "e", Main, func(o runtime.Object) (runtime.Object, error) {
		o.(*corev1.Event).Count++
		return o, nil
	}, WriteOptions{}); err != nil {
		t.Error(err)
	}
}

func TestSelectorsOfUnknownFieldsAreRefused(t *testing.T) {
	w := newWorld(t)
	_, err := w.List(podGK, "", nil, fields.OneTermEqualSelector("spec.foo", "x"))
	if !apierrors.IsBadRequest(err) || err.Error() != "field label not supported: spec.foo" {
		t.Errorf("got %v", err)
	}
	w.create(newPod("a"))
	got, err := w.List(podGK, "default", labels.SelectorFromSet(labels.Set{"app": "a"}), fields.ParseSelectorOrDie("spec.nodeName=,status.phase!=Failed"))
	if err != nil || len(got) != 1 {
		t.Errorf("%d pods, %v", len(got), err)
	}
}

func TestBindErrorsCarryTheReason(t *testing.T) {
	w, ctx := newWorld(t), context.Background()
	node := as[*corev1.Node](t, w.create(newNode("n1")), nil)
	big := newPod("big")
	big.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"cpu": quantity("3")}
	p := as[*corev1.Pod](t, w.create(big), nil)
	errs, err := w.Bind(ctx, []PodBinding{{Namespace: "default", Name: "big", PodUID: p.UID, Node: "n1", NodeUID: node.UID}}, 0)
	if err != nil {
		t.Fatal(err)
	}
	var be *BindError
	if !asError(errs[0], &be) || be.Reason != state.ReasonNoFit || !apierrors.IsConflict(errs[0]) {
		t.Errorf("got %v", errs[0])
	}
}
