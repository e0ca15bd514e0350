// Package printers compares the tables of kubectl get with upstream's own
// printers, for thousands of random objects of every served kind.
package printers

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	_ "k8s.io/kubernetes/pkg/apis/apps/install"
	_ "k8s.io/kubernetes/pkg/apis/coordination/install"
	_ "k8s.io/kubernetes/pkg/apis/core/install"
	_ "k8s.io/kubernetes/pkg/apis/discovery/install"
	_ "k8s.io/kubernetes/pkg/apis/events/install"
	_ "k8s.io/kubernetes/pkg/apis/networking/install"
	_ "k8s.io/kubernetes/pkg/apis/node/install"
	_ "k8s.io/kubernetes/pkg/apis/scheduling/install"
	upstream "k8s.io/kubernetes/pkg/printers"
	"k8s.io/kubernetes/pkg/printers/internalversion"
	"sigs.k8s.io/randfill"

	"github.com/dunlin-project/dunlin/controlplane/api/printers"
	"github.com/dunlin-project/dunlin/manifests"
)

// objectsPerKind is how many random objects of each kind are compared.
const objectsPerKind = 400

// LimitRange has no printer of its own upstream; its table is made by the
// server's generic code, which is not here to compare with.
var withoutPrinter = map[string]bool{"LimitRange": true}

// oneOf picks one of a set, so that rules about special values are met.
func oneOf[T any](set ...T) func(*T, randfill.Continue) {
	return func(v *T, c randfill.Continue) { *v = set[c.Intn(len(set))] }
}

func filler(seed int64) *randfill.Filler {
	when := func(c randfill.Continue) time.Time {
		if c.Intn(8) == 0 {
			return time.Time{}
		}
		// Half past the unit, so that a second between the two printers does
		// not show.
		return time.Now().Add(-time.Duration(c.Intn(900))*time.Hour - 30*time.Minute)
	}
	reason := func(c randfill.Continue) string {
		set := []string{"", "", "Completed", "Error", "CrashLoopBackOff", "PodInitializing", "ContainerCreating", "OOMKilled"}
		return set[c.Intn(len(set))]
	}
	return randfill.NewWithSeed(seed).NilChance(0.4).NumElements(0, 4).MaxDepth(14).Funcs(
		func(t *metav1.Time, c randfill.Continue) { t.Time = when(c) },
		func(t *metav1.MicroTime, c randfill.Continue) { t.Time = when(c) },
		func(q *resource.Quantity, c randfill.Continue) {
			*q = *resource.NewMilliQuantity(int64(c.Intn(5000)), resource.DecimalSI)
		},
		func(v *intstr.IntOrString, c randfill.Continue) { *v = intstr.FromInt32(int32(c.Intn(100))) },
		func(e *runtime.RawExtension, _ randfill.Continue) { e.Raw = []byte("{}") },
		func(f *metav1.FieldsV1, _ randfill.Continue) { f.Raw = []byte("{}") },
		oneOf(corev1.PodPending, corev1.PodRunning, corev1.PodSucceeded, corev1.PodFailed, corev1.PodUnknown),
		oneOf(corev1.ConditionTrue, corev1.ConditionFalse, corev1.ConditionUnknown),
		oneOf(corev1.PodReady, corev1.PodInitialized, corev1.PodScheduled, corev1.PodConditionType("a.example/x")),
		oneOf(corev1.NodeReady, corev1.NodeMemoryPressure),
		oneOf(corev1.NodeInternalIP, corev1.NodeExternalIP, corev1.NodeHostName),
		oneOf(corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeExternalName, corev1.ServiceType("?")),
		oneOf(corev1.ContainerRestartPolicyAlways, corev1.ContainerRestartPolicyNever),
		oneOf(discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeFQDN),
		func(s *corev1.ContainerState, c randfill.Continue) {
			switch c.Intn(4) {
			case 0:
				s.Waiting = &corev1.ContainerStateWaiting{Reason: reason(c)}
			case 1:
				s.Running = &corev1.ContainerStateRunning{}
			case 2:
				s.Terminated = &corev1.ContainerStateTerminated{Reason: reason(c), ExitCode: int32(c.Intn(3)), Signal: int32(c.Intn(2)), FinishedAt: metav1.NewTime(when(c))}
			}
		},
		func(p *corev1.Pod, c randfill.Continue) {
			c.FillNoCustom(p)
			if c.Bool() {
				p.DeletionTimestamp = nil
			}
			p.Status.Reason = []string{"", "", "NodeLost", "Evicted"}[c.Intn(4)]
			for i := range p.Status.Conditions {
				p.Status.Conditions[i].Reason = []string{"", corev1.PodReasonSchedulingGated}[c.Intn(2)]
			}
			// Statuses belong to containers.
			for i := range p.Status.InitContainerStatuses {
				if i < len(p.Spec.InitContainers) {
					p.Status.InitContainerStatuses[i].Name = p.Spec.InitContainers[i].Name
				}
			}
			for i := range p.Status.ContainerStatuses {
				if i < len(p.Spec.Containers) {
					p.Status.ContainerStatuses[i].Name = p.Spec.Containers[i].Name
				}
			}
		},
		func(s *corev1.Service, c randfill.Continue) {
			c.FillNoCustom(s)
			s.Spec.ClusterIP = ""
			if len(s.Spec.ClusterIPs) > 0 {
				s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
			}
		},
		func(s *corev1.Secret, c randfill.Continue) {
			c.FillNoCustom(s)
			s.StringData = nil // merged into data before anything is stored
		},
		func(n *corev1.Node, c randfill.Continue) {
			c.FillNoCustom(n)
			if c.Bool() {
				n.Labels = map[string]string{"node-role.kubernetes.io/edge": "", "kubernetes.io/role": "x", "node-role.kubernetes.io/": ""}
			}
		},
	)
}

func TestTablesEqualUpstream(t *testing.T) {
	generator := upstream.NewTableGenerator().With(internalversion.AddHandlers)
	for _, k := range manifests.Kinds() {
		if withoutPrinter[k.GVK.Kind] {
			continue
		}
		t.Run(k.GVK.GroupKind().String(), func(t *testing.T) {
			for i := range objectsPerKind {
				obj := k.New()
				filler(int64(i)).Fill(obj)
				obj.GetObjectKind().SetGroupVersionKind(k.GVK)
				compare(t, generator, obj)
				if t.Failed() {
					t.Logf("seed %d", i)
					return
				}
			}
		})
	}
}

func compare(t *testing.T, generator upstream.TableGenerator, obj runtime.Object) {
	t.Helper()
	// As the server does it: through defaults, to the internal type.
	stored := obj.DeepCopyObject()
	legacyscheme.Scheme.Default(stored)
	internal, err := legacyscheme.Scheme.UnsafeConvertToVersion(stored.DeepCopyObject(), runtime.InternalGroupVersioner)
	if err != nil {
		t.Fatal(err)
	}
	want, err := generator.GenerateTable(internal, upstream.GenerateOptions{Wide: true})
	if err != nil {
		t.Fatal(err)
	}
	got, err := printers.Table(stored, printers.Options{Now: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Rows) != len(want.Rows) || len(got.ColumnDefinitions) != len(want.ColumnDefinitions) {
		t.Fatalf("%d rows of %d columns, want %d of %d", len(got.Rows), len(got.ColumnDefinitions), len(want.Rows), len(want.ColumnDefinitions))
	}
	for i, c := range want.ColumnDefinitions {
		g := got.ColumnDefinitions[i]
		// Upstream looks the handler's description up in the wrong type.
		if c.Name == "Handler" {
			c.Description = g.Description
		}
		if g != c {
			t.Errorf("column %d:\n got %+v\nwant %+v", i, g, c)
		}
	}
	for i := range want.Rows {
		g, w := encode(t, got.Rows[i].Cells), encode(t, want.Rows[i].Cells)
		if g != w {
			t.Errorf("cells\n got %s\nwant %s\nof %s", g, w, encode(t, stored))
		}
		if a, b := encode(t, got.Rows[i].Conditions), encode(t, want.Rows[i].Conditions); a != b {
			t.Errorf("conditions\n got %s\nwant %s", a, b)
		}
	}
}

func encode(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}
