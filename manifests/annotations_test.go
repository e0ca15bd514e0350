package manifests

import (
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// Annotations that nobody reads are warned of, with what was probably meant;
// those that are read, and other programs' own, are not.
func TestAnnotationsWithoutEffect(t *testing.T) {
	meta := func(keys ...string) (m metav1.ObjectMeta) {
		m.Annotations = map[string]string{"example.com/mine": "x"}
		for _, k := range keys {
			m.Annotations[k] = "x"
		}
		return m
	}
	template := func(keys ...string) corev1.PodTemplateSpec { return corev1.PodTemplateSpec{ObjectMeta: meta(keys...)} }
	other := "nginx"
	for _, c := range []struct {
		obj  runtime.Object
		want []string
	}{
		{&corev1.Service{ObjectMeta: meta("dunlin.dev/outbound")}, []string{"metadata.annotations[dunlin.dev/outbound]: has no effect on a Service, but on pods and templates of pods"}},
		{&corev1.Service{ObjectMeta: meta("traefik.ingress.kubernetes.io/service.sticky.cookie")}, []string{"is another ingress controller's and has no effect here"}},
		{&networkingv1.Ingress{ObjectMeta: meta("dunlin.dev/ssl-redirekt", AnnotationBackendTimeout)}, []string{"metadata.annotations[dunlin.dev/ssl-redirekt]: there is no such annotation; it has no effect; did you mean dunlin.dev/ssl-redirect?"}},
		{&networkingv1.Ingress{ObjectMeta: meta("nginx.ingress.kubernetes.io/rewrite-target", "nginx.ingress.kubernetes.io/force-ssl-redirect")},
			[]string{"use dunlin.dev/ssl-redirect", "rewrite-target]: is another ingress controller's and has no effect here: requests reach the Service with the path that the client sent"}},
		{&networkingv1.Ingress{ObjectMeta: meta("nginx.ingress.kubernetes.io/rewrite-target"), Spec: networkingv1.IngressSpec{IngressClassName: &other}}, nil},
		{&appsv1.Deployment{ObjectMeta: meta(AnnotationAutoRollback, AnnotationOutbound), Spec: appsv1.DeploymentSpec{Template: template("dunlin.dev/outbond", AnnotationPlacement)}},
			[]string{"metadata.annotations[dunlin.dev/outbound]: has no effect on a Deployment, but on pods and templates of pods", "spec.template.metadata.annotations[dunlin.dev/outbond]: there is no such annotation; it has no effect; did you mean dunlin.dev/outbound?"}},
		{&batchv1.CronJob{Spec: batchv1.CronJobSpec{JobTemplate: batchv1.JobTemplateSpec{Spec: batchv1.JobSpec{Template: template("dunlin.dev/stop-dedline")}}}},
			[]string{"spec.jobTemplate.spec.template.metadata.annotations[dunlin.dev/stop-dedline]: there is no such annotation; it has no effect; did you mean dunlin.dev/stop-deadline?"}},
		{&appsv1.StatefulSet{Spec: appsv1.StatefulSetSpec{Template: template("dunlin.dev/auto-rollbak")}}, []string{"did you mean dunlin.dev/auto-rollback, on a Deployment?"}},
		{&corev1.Pod{ObjectMeta: meta("dunlin.dev/zzzzzzzz", AnnotationPorts)}, []string{"metadata.annotations[dunlin.dev/zzzzzzzz]: there is no such annotation; it has no effect"}},
		{&corev1.Pod{ObjectMeta: meta(append(append([]string{}, podAnnotations...), podNotes...)...)}, nil},
		{&appsv1.ReplicaSet{ObjectMeta: meta(AnnotationAutoRollback, AnnotationGoodRevision, AnnotationIgnoredOwners)}, nil},
	} {
		got, _ := Unsupported(c.obj)
		if len(got) != len(c.want) {
			t.Errorf("%T: %q", c.obj, got)
			continue
		}
		for i := range got {
			if !strings.HasSuffix(got[i], c.want[i]) {
				t.Errorf("%q does not end with %q", got[i], c.want[i])
			}
		}
	}
}
