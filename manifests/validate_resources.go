package manifests

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// wholeBytesBelow: fractions of a byte are refused below this amount, where
// they can only be a slip ("400m" for 400Mi). Above it they are rounding of
// something sensible ("2.7Gi" is 2899102924800m).
const wholeBytesBelow = 1 << 20

// quantity checks one amount of a named resource.
func (p *problems) quantity(at *field.Path, name corev1.ResourceName, q resource.Quantity) {
	if q.Sign() < 0 {
		p.invalid(at, q.String(), "must be greater than or equal to 0")
	}
	if isIntegerResource(name) && q.MilliValue()%1000 != 0 {
		p.invalid(at, q, "must be an integer")
	}
	if isBytes(name) {
		p.wholeBytes(at, q)
	}
}

// wholeBytes refuses an amount of bytes that is a small fraction.
func (p *problems) wholeBytes(at *field.Path, q resource.Quantity) {
	if q.Sign() > 0 && q.CmpInt64(wholeBytesBelow) < 0 && q.MilliValue()%1000 != 0 {
		s := q.String()
		digits := strings.TrimSuffix(s, "m")
		p.invalid(at, s, fmt.Sprintf("is a fraction of a byte (\"m\" means thousandths); did you mean %sMi or %sM?", digits, digits))
	}
}

// isBytes says whether a resource counts bytes.
func isBytes(name corev1.ResourceName) bool {
	n := strings.TrimPrefix(strings.TrimPrefix(string(name), "requests."), "limits.")
	switch corev1.ResourceName(n) {
	case corev1.ResourceMemory, corev1.ResourceEphemeralStorage, corev1.ResourceStorage:
		return true
	}
	return strings.HasPrefix(n, corev1.ResourceHugePagesPrefix)
}

func isHugePages(name corev1.ResourceName) bool {
	return strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix)
}

// isNative: of the kubernetes.io namespace, named or implied.
func isNative(name corev1.ResourceName) bool {
	return !strings.Contains(string(name), "/") || strings.Contains(string(name), corev1.ResourceDefaultNamespacePrefix)
}

// overcommittable resources may have requests below their limits.
func overcommittable(name corev1.ResourceName) bool { return isNative(name) && !isHugePages(name) }

func isExtended(name corev1.ResourceName) bool {
	if isNative(name) || strings.HasPrefix(string(name), corev1.DefaultResourceRequestsPrefix) {
		return false
	}
	return len(validation.IsQualifiedName(corev1.DefaultResourceRequestsPrefix+string(name))) == 0
}

// quotaResources are the standard names that a quota may count; the objects
// among them are whole numbers.
var quotaResources = map[corev1.ResourceName]bool{
	corev1.ResourceCPU: false, corev1.ResourceMemory: false, corev1.ResourceEphemeralStorage: false,
	corev1.ResourceRequestsCPU: false, corev1.ResourceRequestsMemory: false, corev1.ResourceRequestsStorage: false,
	corev1.ResourceRequestsEphemeralStorage: false, corev1.ResourceLimitsCPU: false, corev1.ResourceLimitsMemory: false,
	corev1.ResourceLimitsEphemeralStorage: false,
	corev1.ResourcePods:                   true, corev1.ResourceQuotas: true, corev1.ResourceServices: true,
	corev1.ResourceReplicationControllers: true, corev1.ResourceSecrets: true, corev1.ResourceConfigMaps: true,
	corev1.ResourcePersistentVolumeClaims: true, corev1.ResourceServicesNodePorts: true, corev1.ResourceServicesLoadBalancers: true,
}

func isIntegerResource(name corev1.ResourceName) bool {
	return quotaResources[name] || isExtended(name)
}

func isQuotaResource(name corev1.ResourceName) bool {
	_, ok := quotaResources[name]
	return ok || isHugePages(name) || strings.HasPrefix(string(name), corev1.ResourceRequestsHugePagesPrefix)
}

// resourceName checks the general syntax; false if it is hopeless.
func (p *problems) resourceName(at *field.Path, name corev1.ResourceName) bool {
	if msgs := validation.IsQualifiedName(string(name)); len(msgs) > 0 {
		p.invalid(at, name, msgs...)
		return false
	}
	if !strings.Contains(string(name), "/") && !isQuotaResource(name) && name != corev1.ResourceStorage {
		p.invalid(at, name, "must be a standard resource type or fully qualified")
		return false
	}
	return true
}

func (p *problems) containerResourceName(at *field.Path, name corev1.ResourceName) {
	p.resourceName(at, name)
	switch {
	case !strings.Contains(string(name), "/"):
		switch name {
		case corev1.ResourceCPU, corev1.ResourceMemory, corev1.ResourceEphemeralStorage:
		default:
			if !isHugePages(name) {
				p.invalid(at, name, "must be a standard resource for containers")
			}
		}
	case !isNative(name) && !isExtended(name):
		p.invalid(at, name, "doesn't follow extended resource name standard")
	}
}

func (p *problems) podResourceName(at *field.Path, name corev1.ResourceName) {
	if !p.resourceName(at, name) {
		return
	}
	if name != corev1.ResourceCPU && name != corev1.ResourceMemory && !isHugePages(name) {
		p.add(field.NotSupported(at, name, []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceHugePagesPrefix, corev1.ResourceMemory}))
	}
}

// resources checks requests and limits against each other; name checks each
// name.
func (p *problems) resources(at *field.Path, r *corev1.ResourceRequirements, name func(*field.Path, corev1.ResourceName), claims []corev1.PodResourceClaim) {
	var compute, huge bool
	one := func(at *field.Path, n corev1.ResourceName, q resource.Quantity) {
		name(at, n)
		p.quantity(at, n, q)
		if isHugePages(n) {
			huge = true
			if !divisible(n, q) {
				p.invalid(at, q.String(), fmt.Sprintf("%s is not positive integer multiple of %s", q.String(), n))
			}
		}
		compute = compute || n == corev1.ResourceCPU || n == corev1.ResourceMemory
	}
	limits, requests := at.Child("limits"), at.Child("requests")
	for n, q := range r.Limits {
		one(limits.Key(string(n)), n, q)
	}
	for n, q := range r.Requests {
		one(requests.Key(string(n)), n, q)
		limit, limited := r.Limits[n]
		switch {
		case !limited && !overcommittable(n):
			p.required(limits, "Limit must be set for non overcommitable resources")
		case limited && !overcommittable(n) && q.Cmp(limit) != 0:
			p.invalid(requests, q.String(), fmt.Sprintf("must be equal to %s limit of %s", n, limit.String()))
		case limited && q.Cmp(limit) > 0:
			p.invalid(requests, q.String(), fmt.Sprintf("must be less than or equal to %s limit of %s", n, limit.String()))
		}
	}
	if huge && !compute {
		p.forbidden(at, "HugePages require cpu or memory")
	}
	p.claimNames(at.Child("claims"), r.Claims, claims)
}

// divisible says whether q is a positive multiple of the page size in the
// resource's name.
func divisible(name corev1.ResourceName, q resource.Quantity) bool {
	size := strings.TrimPrefix(string(name), corev1.ResourceHugePagesPrefix)
	if hostileNumber(size) {
		return false
	}
	page, err := resource.ParseQuantity(size)
	if err != nil || page.Sign() <= 0 || page.MilliValue()%1000 != 0 || page.Value() == 0 {
		return false
	}
	return q.Value()%page.Value() == 0
}

// claimNames checks that a container's claims name entries of the pod's.
// Claims are not implemented and refused elsewhere; here only references.
func (p *problems) claimNames(at *field.Path, claims []corev1.ResourceClaim, of []corev1.PodResourceClaim) {
	for i, c := range claims {
		if c.Name == "" {
			p.required(at.Index(i), "")
			continue
		}
		found := false
		for _, o := range of {
			found = found || o.Name == c.Name
		}
		if !found {
			e := field.NotFound(at.Index(i), c.Name)
			e.Detail = "must be one of the names in pod.spec.resourceClaims"
			p.add(e)
		}
	}
}

// podLevelResources checks spec.resources against the containers'.
func (p *problems) podLevelResources(at *field.Path, s *corev1.PodSpec) {
	if s.Resources == nil {
		return
	}
	if s.Resources.Claims != nil {
		p.forbidden(at.Child("claims"), "claims may not be set for Resources at pod-level")
	}
	p.resources(at, s.Resources, p.podResourceName, s.ResourceClaims)
	whole := s.DeepCopy()
	whole.Resources, whole.Overhead = nil, nil
	for name, sum := range PodRequests(&corev1.Pod{Spec: *whole}) {
		if q, ok := s.Resources.Requests[name]; ok && sum.Cmp(q) > 0 {
			p.invalid(at.Child("requests").Key(string(name)), q.String(),
				fmt.Sprintf("must be greater than or equal to aggregate container requests of %s", sum.String()))
		}
	}
	for i := range s.Containers {
		for name, q := range s.Containers[i].Resources.Limits {
			if limit, ok := s.Resources.Limits[name]; ok && q.Cmp(limit) > 0 {
				p.invalid(at.Child("containers").Index(i).Key(string(name)).Child("limits"), q.String(),
					fmt.Sprintf("must be less than or equal to pod limits of %s", limit.String()))
			}
		}
	}
}
