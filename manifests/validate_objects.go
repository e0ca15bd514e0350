package manifests

import (
	"encoding/json"
	"fmt"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Highest priority that users may give, and the two classes of the system.
const (
	highestUserPriority = 1000000000
	systemPrefix        = "system-"
)

var systemPriorities = map[string]int32{
	"system-cluster-critical": 2 * highestUserPriority,
	"system-node-critical":    2*highestUserPriority + 1000,
}

func (p *problems) configMap(c *corev1.ConfigMap) {
	size := 0
	for k, v := range c.Data {
		at := field.NewPath("data").Key(k)
		p.invalid(at, k, validation.IsConfigMapKey(k)...)
		if _, ok := c.BinaryData[k]; ok {
			p.invalid(at, k, "duplicate of key present in binaryData")
		}
		size += len(v)
	}
	for k, v := range c.BinaryData {
		p.invalid(field.NewPath("binaryData").Key(k), k, validation.IsConfigMapKey(k)...)
		size += len(v)
	}
	if size > corev1.MaxSecretSize {
		p.add(field.TooLong(field.NewPath(""), "", corev1.MaxSecretSize))
	}
}

const fixedWhenImmutable = "field is immutable when `immutable` is set"

func (p *problems) configMapUpdate(c, old *corev1.ConfigMap) {
	if old.Immutable == nil || !*old.Immutable {
		return
	}
	if c.Immutable == nil || !*c.Immutable {
		p.forbidden(field.NewPath("immutable"), fixedWhenImmutable)
	}
	if !equality.Semantic.DeepEqual(c.Data, old.Data) {
		p.forbidden(field.NewPath("data"), fixedWhenImmutable)
	}
	if !equality.Semantic.DeepEqual(c.BinaryData, old.BinaryData) {
		p.forbidden(field.NewPath("binaryData"), fixedWhenImmutable)
	}
}

func (p *problems) secret(s *corev1.Secret) {
	data, size := field.NewPath("data"), 0
	for k, v := range s.Data {
		p.invalid(data.Key(k), k, validation.IsConfigMapKey(k)...)
		size += len(v)
	}
	if size > corev1.MaxSecretSize {
		p.add(field.TooLong(data, "", corev1.MaxSecretSize))
	}
	has := func(k string) bool { _, ok := s.Data[k]; return ok }
	dockerConfig := func(k string) {
		if !has(k) {
			p.required(data.Key(k), "")
		} else if err := json.Unmarshal(s.Data[k], &map[string]any{}); err != nil {
			p.invalid(data.Key(k), "<secret contents redacted>", err.Error())
		}
	}
	switch s.Type {
	case corev1.SecretTypeServiceAccountToken:
		if s.Annotations[corev1.ServiceAccountNameKey] == "" {
			p.required(metadataPath.Child("annotations").Key(corev1.ServiceAccountNameKey), "")
		}
	case corev1.SecretTypeDockercfg:
		dockerConfig(corev1.DockerConfigKey)
	case corev1.SecretTypeDockerConfigJson:
		dockerConfig(corev1.DockerConfigJsonKey)
	case corev1.SecretTypeBasicAuth:
		if !has(corev1.BasicAuthUsernameKey) && !has(corev1.BasicAuthPasswordKey) {
			p.required(data.Key(corev1.BasicAuthUsernameKey), "")
			p.required(data.Key(corev1.BasicAuthPasswordKey), "")
		}
	case corev1.SecretTypeSSHAuth:
		if len(s.Data[corev1.SSHAuthPrivateKey]) == 0 {
			p.required(data.Key(corev1.SSHAuthPrivateKey), "")
		}
	case corev1.SecretTypeTLS:
		for _, k := range []string{corev1.TLSCertKey, corev1.TLSPrivateKeyKey} {
			if !has(k) {
				p.required(data.Key(k), "")
			}
		}
	}
}

func (p *problems) secretUpdate(s, old *corev1.Secret) {
	p.immutable(field.NewPath("type"), s.Type, old.Type)
	if old.Immutable == nil || !*old.Immutable {
		return
	}
	if s.Immutable == nil || !*s.Immutable {
		p.forbidden(field.NewPath("immutable"), fixedWhenImmutable)
	}
	if !equality.Semantic.DeepEqual(s.Data, old.Data) {
		p.forbidden(field.NewPath("data"), fixedWhenImmutable)
	}
}

func (p *problems) namespace(n *corev1.Namespace) {
	for _, f := range n.Spec.Finalizers {
		at := specPath.Child("finalizers")
		p.add(apivalidation.ValidateFinalizerName(string(f), at)...)
		p.finalizer(at, string(f))
	}
}

// namespaceUpdate covers the finalize sub-resource and status.
// imagePolicy refuses what nodes could not read, and would start nothing for.
func (p *problems) imagePolicy(n *corev1.Namespace) {
	if text, ok := n.Annotations[ImagePolicyAnnotation]; ok {
		if _, err := ParseImagePolicy(text); err != nil {
			p.invalid(metadataPath.Child("annotations").Key(ImagePolicyAnnotation), text, err.Error())
		}
	}
}

func (p *problems) namespaceUpdate(n, old *corev1.Namespace) {
	if !equality.Semantic.DeepEqual(n.Spec.Finalizers, old.Spec.Finalizers) {
		for i, f := range n.Spec.Finalizers {
			at := specPath.Child("finalizers").Index(i)
			p.add(apivalidation.ValidateFinalizerName(string(f), at)...)
			p.finalizer(at, string(f))
		}
	}
	if n.Status.Phase == old.Status.Phase {
		return
	}
	at := statusPath.Child("Phase")
	switch {
	case n.DeletionTimestamp.IsZero() && n.Status.Phase != corev1.NamespaceActive:
		p.invalid(at, n.Status.Phase, "may only be 'Active' if `deletionTimestamp` is empty")
	case !n.DeletionTimestamp.IsZero() && n.Status.Phase != corev1.NamespaceTerminating:
		p.invalid(at, n.Status.Phase, "may only be 'Terminating' if `deletionTimestamp` is not empty")
	}
}

func (p *problems) node(n *corev1.Node, create bool) {
	p.taints(metadataPath.Child("taints"), n.Spec.Taints)
	for name, q := range n.Status.Capacity {
		p.nodeQuantity(field.NewPath("status", "capacity", string(name)), name, q)
	}
	for name, q := range n.Status.Allocatable {
		p.nodeQuantity(field.NewPath("status", "allocatable", string(name)), name, q)
	}
	if !create {
		return
	}
	at := specPath.Child("podCIDRs")
	v6 := 0
	for i, c := range n.Spec.PodCIDRs {
		p.cidr(at.Index(i), c, nil)
		if strings.Contains(c, ":") {
			v6++
		}
	}
	if l := len(n.Spec.PodCIDRs); l > 2 || l == 2 && v6 != 1 {
		p.invalid(at, n.Spec.PodCIDRs, "may specify no more than one CIDR for each IP family")
	}
}

func (p *problems) nodeUpdate(n, old *corev1.Node) {
	used := map[corev1.NodeAddress]bool{}
	for i, a := range n.Status.Addresses {
		if used[a] {
			p.duplicate(statusPath.Child("addresses").Index(i), a)
		}
		used[a] = true
	}
	if len(old.Spec.PodCIDRs) > 0 && !equality.Semantic.DeepEqual(n.Spec.PodCIDRs, old.Spec.PodCIDRs) {
		p.forbidden(specPath.Child("podCIDRs"), `node updates may not change podCIDR except from "" to valid`)
	}
	if was, is := old.Spec.ProviderID, n.Spec.ProviderID; was != "" && is != was {
		what := "modified"
		if is == "" {
			what = "cleared"
		}
		p.invalid(specPath.Child("providerID"), nil, "field cannot be "+what+" once set")
	}
	if n.Spec.DoNotUseExternalID != old.Spec.DoNotUseExternalID {
		p.forbidden(specPath.Child("externalID"), "may not be updated")
	}
}

func (p *problems) lease(l *coordinationv1.Lease) {
	s := &l.Spec
	if d := s.LeaseDurationSeconds; d != nil && *d <= 0 {
		p.invalid(specPath.Child("leaseDurationSeconds"), d, "must be greater than 0")
	}
	if t := s.LeaseTransitions; t != nil && *t < 0 {
		p.invalid(specPath.Child("leaseTransitions"), t, "must be greater than or equal to 0")
	}
	if s.Strategy != nil {
		at := specPath.Child("strategy", "strategy") // the doubled name is upstream's
		if strings.Contains(string(*s.Strategy), "/") {
			p.invalid(at, *s.Strategy, validation.IsQualifiedName(string(*s.Strategy))...)
		} else {
			supported(p, at, *s.Strategy, coordinationv1.OldestEmulationVersion)
		}
	}
	if h := s.PreferredHolder; h != nil && *h != "" && (s.Strategy == nil || *s.Strategy == "") {
		p.forbidden(specPath.Child("preferredHolder"), "may only be specified if `strategy` is defined")
	}
}

func (p *problems) runtimeClass(rc *nodev1.RuntimeClass) {
	if rc.Handler == "" {
		p.required(field.NewPath("handler"), "")
	} else {
		p.invalid(field.NewPath("handler"), rc.Handler, apivalidation.NameIsDNSLabel(rc.Handler, false)...)
	}
	if rc.Overhead != nil {
		p.resources(field.NewPath("overhead"), &corev1.ResourceRequirements{Limits: rc.Overhead.PodFixed}, p.containerResourceName, nil)
	}
	if s := rc.Scheduling; s != nil {
		at := field.NewPath("scheduling")
		p.labels(at.Child("nodeSelector"), s.NodeSelector)
		p.tolerations(at.Child("tolerations"), s.Tolerations)
		used := names{}
		for i, t := range s.Tolerations {
			if used.seen(fmt.Sprintf("%q %q %q %q", t.Key, t.Operator, t.Value, t.Effect)) {
				p.duplicate(at.Child("tolerations").Index(i), t)
			}
		}
	}
}

func (p *problems) priorityClass(pc *schedulingv1.PriorityClass) {
	switch value, known := systemPriorities[pc.Name]; {
	case !strings.HasPrefix(pc.Name, systemPrefix):
		if pc.Value > highestUserPriority {
			p.forbidden(field.NewPath("value"), fmt.Sprintf("maximum allowed value of a user defined priority is %v", highestUserPriority))
		}
	case !known || pc.Value != value || pc.GlobalDefault:
		why := fmt.Sprintf("%v is not a known system priority class", pc.Name)
		if known && pc.Value != value {
			why = fmt.Sprintf("value of %v PriorityClass must be %v", pc.Name, value)
		} else if known {
			why = fmt.Sprintf("globalDefault of %v PriorityClass must be false", pc.Name)
		}
		p.forbidden(metadataPath.Child("name"), "priority class names with 'system-' prefix are reserved for system use only. error: "+why)
	}
	if pc.PreemptionPolicy != nil {
		oneOf(p, field.NewPath("preemptionPolicy"), *pc.PreemptionPolicy, corev1.PreemptLowerPriority, corev1.PreemptNever)
	}
}
