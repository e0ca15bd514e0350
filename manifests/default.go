package manifests

import (
	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Default fills in upstream's defaults for a served kind, implemented by us
// or not: a missing default kills foreign controllers. It is idempotent, and
// must run again after generateName gave a Namespace its name. Types that
// are not served are left alone.
//
// Beyond upstream's defaulting functions it does what upstream does on the
// way to storage: a Secret's stringData moves into data, a live Namespace
// has the finalizer "kubernetes".
func Default(obj runtime.Object) {
	switch o := obj.(type) {
	case *corev1.Pod:
		defaultPod(o)
	case *corev1.PodTemplate:
		defaultPodSpec(&o.Template.Spec)
	case *appsv1.Deployment:
		defaultDeployment(o)
	case *appsv1.ReplicaSet:
		setDefault(&o.Spec.Replicas, 1)
		defaultPodSpec(&o.Spec.Template.Spec)
	case *appsv1.DaemonSet:
		defaultDaemonSet(o)
	case *appsv1.StatefulSet:
		defaultStatefulSet(o)
	case *batchv1.Job:
		defaultJob(o)
	case *batchv1.CronJob:
		defaultCronJob(o)
	case *corev1.ReplicationController:
		defaultReplicationController(o)
	case *corev1.Service:
		defaultService(o)
	case *corev1.Endpoints:
		for i := range o.Subsets {
			for j := range o.Subsets[i].Ports {
				setZero(&o.Subsets[i].Ports[j].Protocol, corev1.ProtocolTCP)
			}
		}
	case *discoveryv1.EndpointSlice:
		for i := range o.Ports {
			setDefault(&o.Ports[i].Name, "")
			setDefault(&o.Ports[i].Protocol, corev1.ProtocolTCP)
		}
	case *corev1.Secret:
		defaultSecret(o)
	case *corev1.Namespace:
		defaultNamespace(o)
	case *corev1.Node:
		defaultNode(o)
	case *corev1.LimitRange:
		for i := range o.Spec.Limits {
			defaultLimit(&o.Spec.Limits[i])
		}
	case *corev1.ResourceQuota:
		roundResources(o.Spec.Hard, o.Status.Hard, o.Status.Used)
	case *schedulingv1.PriorityClass:
		setDefault(&o.PreemptionPolicy, corev1.PreemptLowerPriority)
	case *networkingv1.IngressClass:
		if o.Spec.Parameters != nil {
			setDefault(&o.Spec.Parameters.Scope, networkingv1.IngressClassParametersReferenceScopeCluster)
		}
	case *corev1.PersistentVolume:
		defaultVolumeObject(o)
	case *corev1.PersistentVolumeClaim:
		setZero(&o.Status.Phase, corev1.ClaimPending)
		defaultClaim(&o.Spec)
		roundResources(o.Status.Capacity, o.Status.AllocatedResources)
	case *storagev1.StorageClass:
		setDefault(&o.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete)
		setDefault(&o.VolumeBindingMode, storagev1.VolumeBindingImmediate)
	case *storagev1.CSIDriver:
		defaultDriver(&o.Spec)
	case *storagev1.VolumeAttachment:
		defaultInlineVolume(o.Spec.Source.InlineVolumeSpec)
	case *authenticationv1.TokenRequest:
		setDefault(&o.Spec.ExpirationSeconds, 3600)
	}
}

// setDefault points *p at v if it is nil.
func setDefault[T any](p **T, v T) {
	if *p == nil {
		*p = &v
	}
}

// setZero sets *p to v if it has its zero value.
func setZero[T comparable](p *T, v T) {
	var zero T
	if *p == zero {
		*p = v
	}
}

func defaultDeployment(d *appsv1.Deployment) {
	setDefault(&d.Spec.Replicas, 1)
	s := &d.Spec.Strategy
	setZero(&s.Type, appsv1.RollingUpdateDeploymentStrategyType)
	if s.Type == appsv1.RollingUpdateDeploymentStrategyType {
		if s.RollingUpdate == nil {
			s.RollingUpdate = &appsv1.RollingUpdateDeployment{}
		}
		setDefault(&s.RollingUpdate.MaxUnavailable, intstr.FromString("25%"))
		setDefault(&s.RollingUpdate.MaxSurge, intstr.FromString("25%"))
	}
	setDefault(&d.Spec.RevisionHistoryLimit, 10)
	setDefault(&d.Spec.ProgressDeadlineSeconds, 600)
	defaultPodSpec(&d.Spec.Template.Spec)
}

func defaultReplicationController(rc *corev1.ReplicationController) {
	setDefault(&rc.Spec.Replicas, 1)
	if rc.Spec.Template == nil {
		return
	}
	if labels := rc.Spec.Template.Labels; labels != nil {
		if len(rc.Spec.Selector) == 0 {
			rc.Spec.Selector = copyMap(labels)
		}
		if len(rc.Labels) == 0 {
			rc.Labels = copyMap(labels)
		}
	}
	defaultPodSpec(&rc.Spec.Template.Spec)
}

func copyMap(m map[string]string) map[string]string {
	c := make(map[string]string, len(m))
	for k, v := range m {
		c[k] = v
	}
	return c
}

func defaultService(svc *corev1.Service) {
	s := &svc.Spec
	setZero(&s.SessionAffinity, corev1.ServiceAffinityNone)
	switch s.SessionAffinity {
	case corev1.ServiceAffinityNone:
		s.SessionAffinityConfig = nil
	case corev1.ServiceAffinityClientIP:
		if c := s.SessionAffinityConfig; c == nil || c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil {
			timeout := corev1.DefaultClientIPServiceAffinitySeconds
			s.SessionAffinityConfig = &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: &timeout}}
		}
	}
	setZero(&s.Type, corev1.ServiceTypeClusterIP)
	for i := range s.Ports {
		p := &s.Ports[i]
		setZero(&p.Protocol, corev1.ProtocolTCP)
		if p.TargetPort == intstr.FromInt32(0) || p.TargetPort == intstr.FromString("") {
			p.TargetPort = intstr.FromInt32(p.Port)
		}
	}
	if externallyAccessible(s) {
		setZero(&s.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster)
	}
	switch s.Type {
	case corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer:
		setDefault(&s.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster)
	}
	if s.Type == corev1.ServiceTypeLoadBalancer {
		setDefault(&s.AllocateLoadBalancerNodePorts, true)
		for i := range svc.Status.LoadBalancer.Ingress {
			if in := &svc.Status.LoadBalancer.Ingress[i]; in.IP != "" {
				setDefault(&in.IPMode, corev1.LoadBalancerIPModeVIP)
			}
		}
	}
}

func externallyAccessible(s *corev1.ServiceSpec) bool {
	return s.Type == corev1.ServiceTypeLoadBalancer || s.Type == corev1.ServiceTypeNodePort ||
		(s.Type == corev1.ServiceTypeClusterIP && len(s.ExternalIPs) > 0)
}

func defaultSecret(s *corev1.Secret) {
	setZero(&s.Type, corev1.SecretTypeOpaque)
	if len(s.StringData) == 0 {
		return
	}
	if s.Data == nil {
		s.Data = make(map[string][]byte, len(s.StringData))
	}
	for k, v := range s.StringData {
		s.Data[k] = []byte(v)
	}
	s.StringData = nil
}

func defaultNamespace(n *corev1.Namespace) {
	if n.Name != "" {
		if n.Labels == nil {
			n.Labels = map[string]string{}
		}
		n.Labels[corev1.LabelMetadataName] = n.Name
	}
	setZero(&n.Status.Phase, corev1.NamespaceActive)
	if n.DeletionTimestamp == nil {
		for _, f := range n.Spec.Finalizers {
			if f == corev1.FinalizerKubernetes {
				return
			}
		}
		n.Spec.Finalizers = append(n.Spec.Finalizers, corev1.FinalizerKubernetes)
	}
}

func defaultNode(n *corev1.Node) {
	s := &n.Spec
	switch { // the two forms of the pod range agree; the single one leads
	case s.PodCIDR != "" && (len(s.PodCIDRs) == 0 || s.PodCIDRs[0] != s.PodCIDR):
		s.PodCIDRs = []string{s.PodCIDR}
	case s.PodCIDR == "" && len(s.PodCIDRs) > 0:
		s.PodCIDR = s.PodCIDRs[0]
	}
	if n.Status.Allocatable == nil && n.Status.Capacity != nil {
		n.Status.Allocatable = n.Status.Capacity.DeepCopy()
	}
	roundResources(n.Status.Capacity, n.Status.Allocatable)
}

// defaultLimit derives a container limit's defaults: limit from the maximum,
// request from the limit, then from the minimum.
func defaultLimit(l *corev1.LimitRangeItem) {
	if l.Type == corev1.LimitTypeContainer {
		if l.Default == nil {
			l.Default = corev1.ResourceList{}
		}
		if l.DefaultRequest == nil {
			l.DefaultRequest = corev1.ResourceList{}
		}
		fillResources(l.Default, l.Max)
		fillResources(l.DefaultRequest, l.Default)
		fillResources(l.DefaultRequest, l.Min)
	}
	roundResources(l.Max, l.Min, l.Default, l.DefaultRequest, l.MaxLimitRequestRatio)
}

// fillResources adds what into lacks.
func fillResources(into, from corev1.ResourceList) {
	for name, q := range from {
		if _, ok := into[name]; !ok {
			into[name] = q.DeepCopy()
		}
	}
}

// roundResources rounds every quantity up to thousandths, the API's
// precision.
func roundResources(lists ...corev1.ResourceList) {
	for _, l := range lists {
		for name, q := range l {
			q.RoundUp(-3)
			l[name] = q
		}
	}
}
