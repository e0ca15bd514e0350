package manifests

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Annotations of ours by what they are read on. A key under our prefix that is
// not here is read by nobody.
var (
	// podAnnotations are those that people write on pods and templates of pods.
	podAnnotations = []string{AnnotationStopDeadline, AnnotationReplaceAfter, AnnotationOnReturn, AnnotationOutbound, AnnotationPlacement, AnnotationWeight}
	// podNotes are those that the cluster writes there.
	podNotes = []string{AnnotationPorts, AnnotationLostSince, AnnotationReturned, AnnotationNominal, AnnotationConfigHash, AnnotationConfigSource,
		AnnotationReplaces, AnnotationSuperseded}
	deploymentAnnotations = []string{AnnotationAutoRollback}
	// deploymentNotes are those that the cluster writes on a Deployment or its
	// ReplicaSets.
	deploymentNotes    = []string{AnnotationRolledBack, AnnotationGoodRevision}
	sliceAnnotations   = []string{AnnotationWeights}
	ingressAnnotations = []string{AnnotationSSLRedirect, AnnotationBackendTimeout}
	// notes are those that the cluster writes on anything.
	notes = []string{AnnotationIgnoredOwners}
)

// annotationHomes says where each that people write is read.
var annotationHomes = func() map[string]string {
	out := map[string]string{ImagePolicyAnnotation: "a Namespace"}
	for home, list := range map[string][]string{"pods and templates of pods": podAnnotations, "a Deployment": deploymentAnnotations, "an Ingress": ingressAnnotations,
		"an EndpointSlice": sliceAnnotations} {
		for _, k := range list {
			out[k] = home
		}
	}
	return out
}()

// foreignIngress are prefixes of annotations of other ingress controllers.
var foreignIngress = []string{
	"nginx.ingress.kubernetes.io/", "nginx.org/", "nginx.com/", "traefik.ingress.kubernetes.io/", "ingress.kubernetes.io/",
	"haproxy.org/", "haproxy-ingress.github.io/", "alb.ingress.kubernetes.io/", "projectcontour.io/", "konghq.com/",
}

// foreignInstead says what there is instead of some of them, by what follows
// the prefix.
var foreignInstead = map[string]string{
	"rewrite-target":         "requests reach the Service with the path that the client sent",
	"app-root":               "requests reach the Service with the path that the client sent",
	"use-regex":              "paths are prefixes or exact, as their pathType says",
	"ssl-redirect":           "use " + AnnotationSSLRedirect,
	"force-ssl-redirect":     "use " + AnnotationSSLRedirect,
	"proxy-read-timeout":     "use " + AnnotationBackendTimeout,
	"proxy-send-timeout":     "use " + AnnotationBackendTimeout,
	"proxy-connect-timeout":  "use " + AnnotationBackendTimeout,
	"backend-protocol":       "for gRPC the Service's port has appProtocol: kubernetes.io/h2c",
	"router.entrypoints":     "every host is served over HTTP, and over HTTPS where spec.tls names it",
	"router.tls":             "HTTPS is served where spec.tls names the host",
	"router.middlewares":     "there are none; " + AnnotationSSLRedirect + " redirects to HTTPS",
	"affinity":               "use the Service's sessionAffinity: ClientIP",
	"whitelist-source-range": "nothing here keeps other clients out",
	"auth-type":              "nothing here asks for a password",
	"auth-url":               "nothing here asks for a password",
}

// annotations warns of annotations that have no effect: misspelt ones of ours,
// those that are read elsewhere, and other ingress controllers'.
func (w *walker) annotations(obj runtime.Object) {
	template := func(t *corev1.PodTemplateSpec, path ...string) {
		w.ours(field.NewPath("spec", append(path, "template", "metadata", "annotations")...), "a template of pods", t.Annotations, podAnnotations, podNotes)
	}
	own := func(what string, m *metav1.ObjectMeta, known ...[]string) {
		w.ours(metadataPath.Child("annotations"), what, m.Annotations, known...)
	}
	switch o := obj.(type) {
	case *corev1.Pod:
		own("a Pod", &o.ObjectMeta, podAnnotations, podNotes)
	case *corev1.Service:
		own("a Service", &o.ObjectMeta)
		w.foreign(o.Annotations)
	case *discoveryv1.EndpointSlice:
		own("an EndpointSlice", &o.ObjectMeta, sliceAnnotations)
	case *corev1.Endpoints: // their slices have their annotations
		own("Endpoints", &o.ObjectMeta, sliceAnnotations)
	case *networkingv1.Ingress:
		own("an Ingress", &o.ObjectMeta, ingressAnnotations)
		// An Ingress of another class is another controller's.
		if c := o.Spec.IngressClassName; c == nil || *c == IngressClassName {
			w.foreign(o.Annotations)
		}
	case *appsv1.Deployment:
		own("a Deployment", &o.ObjectMeta, deploymentAnnotations, deploymentNotes)
		template(&o.Spec.Template)
	case *appsv1.ReplicaSet:
		own("a ReplicaSet", &o.ObjectMeta, deploymentAnnotations, deploymentNotes)
		template(&o.Spec.Template)
	case *appsv1.DaemonSet:
		own("a DaemonSet", &o.ObjectMeta)
		template(&o.Spec.Template)
	case *appsv1.StatefulSet:
		own("a StatefulSet", &o.ObjectMeta)
		template(&o.Spec.Template)
	case *batchv1.Job:
		own("a Job", &o.ObjectMeta, podNotes)
		template(&o.Spec.Template)
	case *batchv1.CronJob:
		own("a CronJob", &o.ObjectMeta)
		template(&o.Spec.JobTemplate.Spec.Template, "jobTemplate", "spec")
	}
}

// ours warns of keys under our prefix that nobody reads there.
func (w *walker) ours(at *field.Path, what string, have map[string]string, known ...[]string) {
	names := slices.Concat(append(known, notes)...)
	for _, k := range slices.Sorted(maps.Keys(have)) {
		if !strings.HasPrefix(k, Prefix) || slices.Contains(names, k) {
			continue
		}
		if home, ok := annotationHomes[k]; ok {
			w.warn(at.Key(k), fmt.Sprintf("has no effect on %s, but on %s", what, home))
			continue
		}
		near := nearestAnnotation(k, names)
		if near == "" {
			near = nearestAnnotation(k, slices.Sorted(maps.Keys(annotationHomes)))
		}
		switch home := annotationHomes[near]; {
		case near == "":
			w.warn(at.Key(k), "there is no such annotation; it has no effect")
		case slices.Contains(names, near):
			w.warn(at.Key(k), "there is no such annotation; it has no effect; did you mean "+near+"?")
		default:
			w.warn(at.Key(k), fmt.Sprintf("there is no such annotation; it has no effect; did you mean %s, on %s?", near, home))
		}
	}
}

// nearestAnnotation is what was most likely meant, "" if nothing is near. The
// prefix is no part of what is compared.
func nearestAnnotation(k string, names []string) string {
	short := make([]string, 0, len(names))
	for _, n := range names {
		short = append(short, strings.TrimPrefix(n, Prefix))
	}
	if near := nearest(strings.TrimPrefix(k, Prefix), short); len(near) > 0 {
		return Prefix + near[0]
	}
	return ""
}

// foreign warns of annotations of other ingress controllers.
func (w *walker) foreign(have map[string]string) {
	for _, k := range slices.Sorted(maps.Keys(have)) {
		i := slices.IndexFunc(foreignIngress, func(p string) bool { return strings.HasPrefix(k, p) })
		if i < 0 {
			continue
		}
		why := "is another ingress controller's and has no effect here"
		if instead := foreignInstead[strings.TrimPrefix(k, foreignIngress[i])]; instead != "" {
			why += ": " + instead
		}
		w.warn(metadataPath.Child("annotations").Key(k), why)
	}
}
