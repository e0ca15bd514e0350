package manifests

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

func (p *problems) tolerations(at *field.Path, tolerations []corev1.Toleration) {
	for i := range tolerations {
		t, one := &tolerations[i], at.Index(i)
		if t.Key != "" {
			p.labelName(one.Child("key"), t.Key)
		} else if t.Operator != corev1.TolerationOpExists {
			p.invalid(one.Child("operator"), t.Operator, `operator must be Exists when `+"`key`"+` is empty, which means "match all values and all keys"`)
		}
		if t.TolerationSeconds != nil && t.Effect != corev1.TaintEffectNoExecute {
			p.invalid(one.Child("effect"), t.Effect, "effect must be 'NoExecute' when `tolerationSeconds` is set")
		}
		switch t.Operator {
		case corev1.TolerationOpEqual, "":
			if msgs := validation.IsValidLabelValue(t.Value); len(msgs) > 0 {
				p.invalid(one.Child("operator"), t.Value, strings.Join(msgs, ";"))
			}
		case corev1.TolerationOpExists:
			if t.Value != "" {
				p.invalid(one.Child("operator"), t.Value, "value must be empty when `operator` is 'Exists'")
			}
		case corev1.TolerationOpLt, corev1.TolerationOpGt:
			p.add(field.NotSupported(one.Child("operator"), t.Operator, []corev1.TolerationOperator{
				corev1.TolerationOpEqual, corev1.TolerationOpExists, corev1.TolerationOpLt, corev1.TolerationOpGt}))
		default:
			p.add(field.NotSupported(one.Child("operator"), t.Operator, []corev1.TolerationOperator{
				corev1.TolerationOpEqual, corev1.TolerationOpExists}))
		}
		if t.Effect != "" {
			p.taintEffect(one.Child("effect"), t.Effect)
		}
	}
}

func (p *problems) taintEffect(at *field.Path, e corev1.TaintEffect) {
	oneOf(p, at, e, corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute)
}

func (p *problems) taints(at *field.Path, taints []corev1.Taint) {
	used := names{}
	for i := range taints {
		t, one := &taints[i], at.Index(i)
		p.labelName(one.Child("key"), t.Key)
		if msgs := validation.IsValidLabelValue(t.Value); len(msgs) > 0 {
			p.invalid(one.Child("value"), t.Value, strings.Join(msgs, ";"))
		}
		p.taintEffect(one.Child("effect"), t.Effect)
		if used.seen(string(t.Effect) + " " + t.Key) {
			e := field.Duplicate(one, *t)
			e.Detail = "taints must be unique by key and effect pair"
			p.add(e)
		}
	}
}

func (p *problems) affinity(at *field.Path, a *corev1.Affinity) {
	if a == nil {
		return
	}
	const required, preferred = "requiredDuringSchedulingIgnoredDuringExecution", "preferredDuringSchedulingIgnoredDuringExecution"
	if n := a.NodeAffinity; n != nil {
		in := at.Child("nodeAffinity")
		if n.RequiredDuringSchedulingIgnoredDuringExecution != nil {
			p.nodeSelector(in.Child(required), n.RequiredDuringSchedulingIgnoredDuringExecution)
		}
		for i := range n.PreferredDuringSchedulingIgnoredDuringExecution {
			t, one := &n.PreferredDuringSchedulingIgnoredDuringExecution[i], in.Child(preferred).Index(i)
			p.weight(one, t.Weight)
			p.nodeSelectorTerm(one.Child("preference"), &t.Preference, false)
		}
	}
	pods := func(in *field.Path, req []corev1.PodAffinityTerm, pref []corev1.WeightedPodAffinityTerm) {
		for i := range req {
			p.podAffinityTerm(in.Child(required).Index(i), &req[i])
		}
		for i := range pref {
			one := in.Child(preferred).Index(i)
			p.weight(one, pref[i].Weight)
			p.podAffinityTerm(one.Child("podAffinityTerm"), &pref[i].PodAffinityTerm)
		}
	}
	if x := a.PodAffinity; x != nil {
		pods(at.Child("podAffinity"), x.RequiredDuringSchedulingIgnoredDuringExecution, x.PreferredDuringSchedulingIgnoredDuringExecution)
	}
	if x := a.PodAntiAffinity; x != nil {
		pods(at.Child("podAntiAffinity"), x.RequiredDuringSchedulingIgnoredDuringExecution, x.PreferredDuringSchedulingIgnoredDuringExecution)
	}
}

func (p *problems) weight(at *field.Path, w int32) {
	if w <= 0 || w > 100 {
		p.invalid(at.Child("weight"), w, "must be in the range 1-100")
	}
}

func (p *problems) nodeSelector(at *field.Path, s *corev1.NodeSelector) {
	terms := at.Child("nodeSelectorTerms")
	if len(s.NodeSelectorTerms) == 0 {
		p.required(terms, "must have at least one node selector term")
	}
	for i := range s.NodeSelectorTerms {
		p.nodeSelectorTerm(terms.Index(i), &s.NodeSelectorTerms[i], true)
	}
}

// nodeSelectorTerm: values of preferences are not checked, as upstream never
// did.
func (p *problems) nodeSelectorTerm(at *field.Path, t *corev1.NodeSelectorTerm, values bool) {
	for i := range t.MatchExpressions {
		p.nodeRequirement(at.Child("matchExpressions").Index(i), &t.MatchExpressions[i], values)
	}
	for i := range t.MatchFields {
		r, one := &t.MatchFields[i], at.Child("matchFields").Index(i)
		switch r.Operator {
		case corev1.NodeSelectorOpIn, corev1.NodeSelectorOpNotIn:
			if len(r.Values) != 1 {
				p.required(one.Child("values"), "must be only one value when `operator` is 'In' or 'NotIn' for node field selector")
			}
		default:
			p.invalid(one.Child("operator"), r.Operator, "not a valid selector operator")
		}
		if r.Key != metav1.ObjectNameField {
			p.invalid(one.Child("key"), r.Key, "not a valid field selector key")
			continue
		}
		for j, v := range r.Values {
			p.invalid(one.Child("values").Index(j), v, apivalidation.NameIsDNSSubdomain(v, false)...)
		}
	}
}

func (p *problems) nodeRequirement(at *field.Path, r *corev1.NodeSelectorRequirement, values bool) {
	in := at.Child("values")
	switch r.Operator {
	case corev1.NodeSelectorOpIn, corev1.NodeSelectorOpNotIn:
		if len(r.Values) == 0 {
			p.required(in, "must be specified when `operator` is 'In' or 'NotIn'")
		}
	case corev1.NodeSelectorOpExists, corev1.NodeSelectorOpDoesNotExist:
		if len(r.Values) > 0 {
			p.forbidden(in, "may not be specified when `operator` is 'Exists' or 'DoesNotExist'")
		}
	case corev1.NodeSelectorOpGt, corev1.NodeSelectorOpLt:
		if len(r.Values) != 1 {
			p.required(in, "must be specified single value when `operator` is 'Lt' or 'Gt'")
		}
	default:
		p.invalid(at.Child("operator"), r.Operator, "not a valid selector operator")
	}
	p.labelName(at.Child("key"), r.Key)
	if values {
		for i, v := range r.Values {
			p.invalid(in.Index(i), v, validation.IsValidLabelValue(v)...)
		}
	}
}

func (p *problems) podAffinityTerm(at *field.Path, t *corev1.PodAffinityTerm) {
	p.selector(at.Child("labelSelector"), t.LabelSelector)
	p.selector(at.Child("namespaceSelector"), t.NamespaceSelector)
	for _, n := range t.Namespaces {
		p.invalid(at.Child("namespace"), n, apivalidation.ValidateNamespaceName(n, false)...)
	}
	p.matchLabelKeys(at, t.MatchLabelKeys, t.MismatchLabelKeys, t.LabelSelector)
	if t.TopologyKey == "" {
		p.required(at.Child("topologyKey"), "can not be empty")
	}
	p.labelName(at.Child("topologyKey"), t.TopologyKey)
}

func (p *problems) matchLabelKeys(at *field.Path, match, mismatch []string, s *metav1.LabelSelector) {
	keys := func(in *field.Path, keys []string) {
		if len(keys) == 0 {
			return
		}
		if s == nil {
			p.forbidden(in, "must not be specified when labelSelector is not set")
			return
		}
		for i, k := range keys {
			p.labelName(in.Index(i), k)
		}
	}
	keys(at.Child("matchLabelKeys"), match)
	keys(at.Child("mismatchLabelKeys"), mismatch)
	if s != nil {
		used := names{}
		for k := range s.MatchLabels {
			used[k] = true
		}
		for _, e := range s.MatchExpressions {
			was := used.seen(e.Key)
			for i, k := range match {
				if was && k == e.Key {
					p.invalid(at.Index(i), k, "exists in both matchLabelKeys and labelSelector")
				}
			}
		}
	}
	for i, k := range match {
		if contains(mismatch, k) {
			p.invalid(at.Child("matchLabelKeys").Index(i), k, "exists in both matchLabelKeys and mismatchLabelKeys")
		}
	}
}

func (p *problems) topologySpread(at *field.Path, cs []corev1.TopologySpreadConstraint) {
	for i := range cs {
		c, one := &cs[i], at.Index(i)
		p.positive(one.Child("maxSkew"), int64(c.MaxSkew))
		if c.TopologyKey == "" {
			p.required(one.Child("topologyKey"), "can not be empty")
		}
		supported(p, one.Child("whenUnsatisfiable"), c.WhenUnsatisfiable, corev1.DoNotSchedule, corev1.ScheduleAnyway)
		for _, o := range cs[i+1:] {
			if o.TopologyKey == c.TopologyKey && o.WhenUnsatisfiable == c.WhenUnsatisfiable {
				p.duplicate(one.Child("{topologyKey, whenUnsatisfiable}"), fmt.Sprintf("{%v, %v}", c.TopologyKey, c.WhenUnsatisfiable))
				break
			}
		}
		if d := c.MinDomains; d != nil {
			p.positive(one.Child("minDomains"), int64(*d))
			if c.WhenUnsatisfiable != corev1.DoNotSchedule {
				p.invalid(one.Child("minDomains"), d, fmt.Sprintf("can only use minDomains if whenUnsatisfiable=%s, not %s", corev1.DoNotSchedule, c.WhenUnsatisfiable))
			}
		}
		supportedIfSet(p, one.Child("nodeAffinityPolicy"), c.NodeAffinityPolicy, corev1.NodeInclusionPolicyHonor, corev1.NodeInclusionPolicyIgnore)
		supportedIfSet(p, one.Child("nodeTaintsPolicy"), c.NodeTaintsPolicy, corev1.NodeInclusionPolicyHonor, corev1.NodeInclusionPolicyIgnore)
		p.matchLabelKeys(one, c.MatchLabelKeys, nil, c.LabelSelector)
		p.selector(one.Child("labelSelector"), c.LabelSelector)
	}
}
