package registry

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// TestWhichPortIsTaken: the refusal of a node port that another Service has
// names the very port of the Service that asks for it, in a dry run or not, new
// or changed.
func TestWhichPortIsTaken(t *testing.T) {
	w := newWorld(t)
	ctx := t.Context()
	svc := func(name string, ports ...int32) *corev1.Service {
		s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
			Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeLoadBalancer, Selector: map[string]string{"a": "b"}}}
		for i, p := range ports {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: string(rune('a' + i)), Port: int32(80 + i), NodePort: p})
		}
		return s
	}
	w.create(svc("first", 31234))
	w.create(svc("second", 0))
	refused := func(what, field string, err error) {
		t.Helper()
		if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), field+`: Invalid value: "31234": provided port is already allocated`) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, dry := range []bool{true, false} {
		o := WriteOptions{DryRun: dry}
		_, err := w.Create(ctx, svc("new", 0, 31235, 31234), o)
		refused("new", "spec.ports[2].nodePort", err)
		_, err = w.Update(ctx, svcGK, "default", "second", Main, func(o runtime.Object) (runtime.Object, error) {
			n := o.(*corev1.Service)
			n.Spec.Ports = append(n.Spec.Ports, corev1.ServicePort{Name: "b", Port: 81, NodePort: 31234})
			return n, nil
		}, o)
		refused("changed", "spec.ports[1].nodePort", err)
		health := svc("health", 0)
		health.Spec.ExternalTrafficPolicy, health.Spec.HealthCheckNodePort = corev1.ServiceExternalTrafficPolicyLocal, 31234
		_, err = w.Create(ctx, health, o)
		refused("health checks", "spec.healthCheckNodePort", err)
	}
}
