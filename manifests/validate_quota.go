package manifests

import (
	"fmt"
	"sort"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// nodeQuantity is quantity without the whole-bytes rule: nodes measure.
func (p *problems) nodeQuantity(at *field.Path, name corev1.ResourceName, q resource.Quantity) {
	if isBytes(name) {
		name = corev1.ResourceCPU
	}
	p.quantity(at, name, q)
}

func (p *problems) quotaList(at *field.Path, l corev1.ResourceList) {
	for name, q := range l {
		one := at.Key(string(name))
		p.resourceName(one, name)
		if !strings.Contains(string(name), "/") && !isQuotaResource(name) {
			p.invalid(one, name, "must be a standard resource for quota")
		}
		p.quantity(one, name, q)
	}
}

func (p *problems) resourceQuota(rq *corev1.ResourceQuota, create bool) {
	p.quotaList(specPath.Child("hard"), rq.Spec.Hard)
	if create {
		p.quotaList(statusPath.Child("hard"), rq.Status.Hard)
		p.quotaList(statusPath.Child("used"), rq.Status.Used)
	}
	p.quotaScopes(&rq.Spec)
	if rq.Spec.ScopeSelector != nil {
		p.scopeSelector(&rq.Spec)
	}
}

var knownScopes = []corev1.ResourceQuotaScope{
	corev1.ResourceQuotaScopeTerminating, corev1.ResourceQuotaScopeNotTerminating, corev1.ResourceQuotaScopeBestEffort,
	corev1.ResourceQuotaScopeNotBestEffort, corev1.ResourceQuotaScopePriorityClass,
	corev1.ResourceQuotaScopeVolumeAttributesClass, corev1.ResourceQuotaScopeCrossNamespacePodAffinity,
}

func knownScope(s corev1.ResourceQuotaScope) bool {
	for _, k := range knownScopes {
		if s == k {
			return true
		}
	}
	return false
}

// scopeFits says whether a scope makes sense for a counted resource.
func scopeFits(s corev1.ResourceQuotaScope, name corev1.ResourceName) bool {
	pods := name == corev1.ResourcePods
	compute := strings.HasSuffix(string(name), "cpu") || strings.HasSuffix(string(name), "memory")
	switch s {
	case corev1.ResourceQuotaScopeTerminating, corev1.ResourceQuotaScopeNotTerminating, corev1.ResourceQuotaScopeNotBestEffort,
		corev1.ResourceQuotaScopePriorityClass, corev1.ResourceQuotaScopeCrossNamespacePodAffinity:
		return pods || compute
	case corev1.ResourceQuotaScopeBestEffort:
		return pods
	case corev1.ResourceQuotaScopeVolumeAttributesClass:
		return name == corev1.ResourcePersistentVolumeClaims || name == corev1.ResourceRequestsStorage
	}
	return true
}

func conflicting(scopes map[corev1.ResourceQuotaScope]bool) (pairs int) {
	if scopes[corev1.ResourceQuotaScopeBestEffort] && scopes[corev1.ResourceQuotaScopeNotBestEffort] {
		pairs++
	}
	if scopes[corev1.ResourceQuotaScopeTerminating] && scopes[corev1.ResourceQuotaScopeNotTerminating] {
		pairs++
	}
	return pairs
}

func (p *problems) quotaScopes(s *corev1.ResourceQuotaSpec) {
	at, set := specPath.Child("scopes"), map[corev1.ResourceQuotaScope]bool{}
	for _, scope := range s.Scopes {
		if !knownScope(scope) {
			p.invalid(at, s.Scopes, "unsupported scope")
		}
		for name := range s.Hard {
			if isQuotaResource(name) && !scopeFits(scope, name) {
				p.invalid(at, s.Scopes, "unsupported scope applied to resource")
			}
		}
		set[scope] = true
	}
	for range conflicting(set) {
		p.invalid(at, s.Scopes, "conflicting scopes")
	}
}

func (p *problems) scopeSelector(s *corev1.ResourceQuotaSpec) {
	at, set := specPath.Child("scopeSelector", "matchExpressions"), map[corev1.ResourceQuotaScope]bool{}
	for _, r := range s.ScopeSelector.MatchExpressions {
		if !knownScope(r.ScopeName) {
			p.invalid(at.Child("scopeName"), r.ScopeName, "unsupported scope")
		}
		for name := range s.Hard {
			if isQuotaResource(name) && !scopeFits(r.ScopeName, name) {
				p.invalid(at, s.ScopeSelector, "unsupported scope applied to resource")
			}
		}
		switch r.ScopeName {
		case corev1.ResourceQuotaScopePriorityClass, corev1.ResourceQuotaScopeVolumeAttributesClass:
		default:
			if knownScope(r.ScopeName) && r.Operator != corev1.ScopeSelectorOpExists {
				p.invalid(at.Child("operator"), r.Operator, "must be 'Exists' when scope is any of ResourceQuotaScopeTerminating, ResourceQuotaScopeNotTerminating, ResourceQuotaScopeBestEffort, ResourceQuotaScopeNotBestEffort or ResourceQuotaScopeCrossNamespacePodAffinity")
			}
		}
		switch r.Operator {
		case corev1.ScopeSelectorOpIn, corev1.ScopeSelectorOpNotIn:
			if len(r.Values) == 0 {
				p.required(at.Child("values"), "must be at least one value when `operator` is 'In' or 'NotIn' for scope selector")
			}
		case corev1.ScopeSelectorOpExists, corev1.ScopeSelectorOpDoesNotExist:
			if len(r.Values) > 0 {
				p.invalid(at.Child("values"), r.Values, "must be no value when `operator` is 'Exist' or 'DoesNotExist' for scope selector")
			}
		default:
			p.invalid(at.Child("operator"), r.Operator, "not a valid selector operator")
		}
		set[r.ScopeName] = true
	}
	for range conflicting(set) {
		p.invalid(specPath.Child("scopeSelector", "matchExpressions"), s.Scopes, "conflicting scopes")
	}
}

func (p *problems) quotaUpdate(rq, old *corev1.ResourceQuota) {
	set := func(scopes []corev1.ResourceQuotaScope) string {
		var l []string
		for _, s := range scopes {
			if !contains(l, string(s)) {
				l = append(l, string(s))
			}
		}
		sort.Strings(l)
		return strings.Join(l, " ")
	}
	if set(rq.Spec.Scopes) != set(old.Spec.Scopes) {
		p.invalid(specPath.Child("scopes"), rq.Spec.Scopes, "field is immutable")
	}
}

func (p *problems) limitRange(lr *corev1.LimitRange) {
	used := names{}
	for i := range lr.Spec.Limits {
		l, at := &lr.Spec.Limits[i], specPath.Child("limits").Index(i)
		if msgs := validation.IsQualifiedName(string(l.Type)); len(msgs) > 0 {
			p.invalid(at.Child("type"), l.Type, msgs...)
		} else if !strings.Contains(string(l.Type), "/") && l.Type != corev1.LimitTypePod &&
			l.Type != corev1.LimitTypeContainer && l.Type != corev1.LimitTypePersistentVolumeClaim {
			p.invalid(at.Child("type"), l.Type, "must be a standard limit type or fully qualified")
		}
		if used.seen(string(l.Type)) {
			p.duplicate(at.Child("type"), l.Type)
		}
		p.limitNames(at, l)
		if l.Type == corev1.LimitTypePersistentVolumeClaim {
			_, lower := l.Min[corev1.ResourceStorage]
			_, upper := l.Max[corev1.ResourceStorage]
			if !lower && !upper {
				p.required(at.Child("limits"), "either minimum or maximum storage value is required, but neither was provided")
			}
		}
		keys := map[corev1.ResourceName]bool{}
		lists := []corev1.ResourceList{l.Max, l.Min, l.MaxLimitRequestRatio}
		if l.Type != corev1.LimitTypePod {
			lists = append(lists, l.Default, l.DefaultRequest)
		}
		for _, list := range lists {
			for name := range list {
				keys[name] = true
			}
		}
		for name := range keys {
			p.limitOrder(at, l, name)
		}
	}
}

func (p *problems) limitNames(at *field.Path, l *corev1.LimitRangeItem) {
	name := func(at *field.Path, n corev1.ResourceName) {
		if l.Type == corev1.LimitTypePod || l.Type == corev1.LimitTypeContainer {
			p.containerResourceName(at, n)
		} else {
			p.resourceName(at, n)
		}
	}
	check := func(field string, list corev1.ResourceList, amount bool) {
		for n, q := range list {
			name(at.Child(field).Key(string(n)), n)
			if amount && isBytes(n) {
				p.wholeBytes(at.Child(field).Key(string(n)), q)
			}
		}
	}
	check("max", l.Max, true)
	check("min", l.Min, true)
	check("maxLimitRequestRatio", l.MaxLimitRequestRatio, false)
	if l.Type != corev1.LimitTypePod {
		check("default", l.Default, true)
		check("defaultRequest", l.DefaultRequest, true)
		return
	}
	if len(l.Default) > 0 {
		p.forbidden(at.Child("default"), "may not be specified when `type` is 'Pod'")
	}
	if len(l.DefaultRequest) > 0 {
		p.forbidden(at.Child("defaultRequest"), "may not be specified when `type` is 'Pod'")
	}
}

// limitOrder: min <= default request <= default <= max, for one resource.
func (p *problems) limitOrder(at *field.Path, l *corev1.LimitRangeItem, name corev1.ResourceName) {
	lower, hasMin := l.Min[name]
	upper, hasMax := l.Max[name]
	def, hasDef := l.Default[name]
	req, hasReq := l.DefaultRequest[name]
	if l.Type == corev1.LimitTypePod {
		hasDef, hasReq = false, false
	}
	order := func(both bool, field string, shown, a resource.Quantity, an string, b resource.Quantity, bn string) {
		if both && a.Cmp(b) > 0 {
			p.invalid(at.Child(field).Key(string(name)), shown, fmt.Sprintf("%s value %s is greater than %s value %s", an, a.String(), bn, b.String()))
		}
	}
	order(hasMin && hasMax, "min", lower, lower, "min", upper, "max")
	order(hasReq && hasMin, "defaultRequest", req, lower, "min", req, "default request")
	order(hasReq && hasMax, "defaultRequest", req, req, "default request", upper, "max")
	order(hasReq && hasDef, "defaultRequest", req, req, "default request", def, "default limit")
	order(hasDef && hasMin, "default", lower, lower, "min", def, "default")
	order(hasDef && hasMax, "default", upper, def, "default", upper, "max")
	if ratio, ok := l.MaxLimitRequestRatio[name]; ok {
		in := at.Child("maxLimitRequestRatio").Key(string(name))
		if ratio.CmpInt64(1) < 0 {
			p.invalid(in, ratio, fmt.Sprintf("ratio %s is less than 1", ratio.String()))
		}
		if hasMin && hasMax {
			if limit := upper.AsApproximateFloat64() / lower.AsApproximateFloat64(); ratio.AsApproximateFloat64() > limit {
				p.invalid(in, ratio, fmt.Sprintf("ratio %s is greater than max/min = %f", ratio.String(), limit))
			}
		}
	}
	if !overcommittable(name) && hasDef && hasReq && def.Cmp(req) != 0 {
		p.invalid(at.Child("defaultRequest").Key(string(name)), req,
			fmt.Sprintf("default value %s must equal to defaultRequest value %s in %s", def.String(), req.String(), name))
	}
}
