package manifests

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/dunlin-project/dunlin/internal/outbound"
)

// pod checks a Pod's annotations and spec.
func (p *problems) pod(pod *corev1.Pod, create bool) {
	s := &pod.Spec
	p.podAnnotations(metadataPath.Child("annotations"), pod.Annotations, s)
	p.podSpec(specPath, s)
	p.hostNetworkPorts(specPath, s, true)
	if s.ServiceAccountName == "" {
		for i := range s.Volumes {
			if s.Volumes[i].Projected == nil {
				continue
			}
			for j, src := range s.Volumes[i].Projected.Sources {
				if src.ServiceAccountToken != nil {
					p.forbidden(specPath.Child("volumes").Index(i).Child("projected", "sources").Index(j).Child("serviceAccountToken"),
						"must not be specified when serviceAccountName is not set")
				}
			}
		}
	}
	if g := s.TerminationGracePeriodSeconds; g != nil {
		p.nonNegative(specPath.Child("terminationGracePeriodSeconds"), *g)
	}
	p.imageSpaces(specPath.Child("containers"), s.Containers)
	p.imageSpaces(specPath.Child("initContainers"), s.InitContainers)
	if !create {
		return
	}
	if len(s.EphemeralContainers) > 0 {
		p.forbidden(specPath.Child("ephemeralContainers"), "cannot be set on create")
	}
	if s.NodeName != "" && len(s.SchedulingGates) > 0 {
		p.forbidden(specPath.Child("nodeName"), "cannot be set until all schedulingGates have been cleared")
	}
}

func (p *problems) podAnnotations(at *field.Path, a map[string]string, s *corev1.PodSpec) {
	if v, ok := a[corev1.MirrorPodAnnotationKey]; ok && s.NodeName == "" {
		p.invalid(at.Key(corev1.MirrorPodAnnotationKey), v, "must set spec.nodeName if mirror pod annotation is set")
	}
	if v, ok := a[corev1.PodDeletionCost]; ok && !validDeletionCost(v) {
		p.invalid(at.Key(corev1.PodDeletionCost), v, "must be a 32bit integer")
	}
	p.disconnect(at, a)
	if v, ok := a[AnnotationWeight]; ok {
		if _, err := ParseWeight(v); err != nil {
			p.invalid(at.Key(AnnotationWeight), v, err.Error())
		}
	}
	if v, ok := a[AnnotationOutbound]; ok {
		if _, err := outbound.Parse(v); err != nil {
			p.invalid(at.Key(AnnotationOutbound), v, err.Error())
		}
	}
}

// validDeletionCost: a decimal 32-bit number without plus sign or leading
// zeros.
func validDeletionCost(v string) bool {
	if v == "" || v[0] == '+' || v[0] == '0' && len(v) > 1 || strings.HasPrefix(v, "-0") {
		return false
	}
	_, err := strconv.ParseInt(v, 10, 32)
	return err == nil
}

// podSpec checks what pods and templates have in common.
func (p *problems) podSpec(at *field.Path, s *corev1.PodSpec) {
	if s.TerminationGracePeriodSeconds == nil {
		p.required(at.Child("terminationGracePeriodSeconds"), "")
	}
	volumes := p.volumes(at.Child("volumes"), s.Volumes)
	p.containers(at.Child("containers"), s, volumes)
	p.initContainers(at.Child("initContainers"), s, volumes)
	p.podLevelResources(at.Child("resources"), s)
	oneOf(p, at.Child("restartPolicy"), s.RestartPolicy, corev1.RestartPolicyAlways, corev1.RestartPolicyOnFailure, corev1.RestartPolicyNever)
	oneOf(p, at.Child("dnsPolicy"), s.DNSPolicy, corev1.DNSClusterFirstWithHostNet, corev1.DNSClusterFirst, corev1.DNSDefault, corev1.DNSNone)
	p.labels(at.Child("nodeSelector"), s.NodeSelector)
	p.podSecurityContext(at.Child("securityContext"), s.SecurityContext)
	if s.ShareProcessNamespace != nil && *s.ShareProcessNamespace && s.HostPID {
		p.invalid(at.Child("shareProcessNamespace"), true, "ShareProcessNamespace and HostPID cannot both be enabled")
	}
	p.affinity(at.Child("affinity"), s.Affinity)
	p.dnsConfig(at.Child("dnsConfig"), s)
	for i, g := range s.ReadinessGates {
		p.qualifiedName(at.Child("readinessGates").Index(i).Child("conditionType"), string(g.ConditionType))
	}
	p.schedulingGates(at.Child("schedulingGates"), s.SchedulingGates)
	p.topologySpread(at.Child("topologySpreadConstraints"), s.TopologySpreadConstraints)
	p.podNames(at, s)
	if d := s.ActiveDeadlineSeconds; d != nil && (*d < 1 || *d > math.MaxInt32) {
		p.invalid(at.Child("activeDeadlineSeconds"), *d, validation.InclusiveRangeError(1, math.MaxInt32))
	}
	p.tolerations(at.Child("tolerations"), s.Tolerations)
	for i, h := range s.HostAliases {
		one := at.Child("hostAliases").Index(i)
		p.ip(one.Child("ip"), h.IP, nil)
		for j, name := range h.Hostnames {
			p.dnsSubdomain(one.Child("hostnames").Index(j), name)
		}
	}
	if s.PreemptionPolicy != nil {
		oneOf(p, at.Child("preemptionPolicy"), *s.PreemptionPolicy, corev1.PreemptLowerPriority, corev1.PreemptNever)
	}
	if s.Overhead != nil {
		p.resources(at.Child("overhead"), &corev1.ResourceRequirements{Limits: s.Overhead}, p.containerResourceName, nil)
	}
	if s.OS != nil {
		if s.OS.Name == "" {
			p.required(at.Child("os", "name"), "")
		} else {
			supported(p, at.Child("os"), s.OS.Name, corev1.Linux, corev1.Windows)
		}
	}
}

// podNames checks the fields of a pod spec that name things.
func (p *problems) podNames(at *field.Path, s *corev1.PodSpec) {
	subdomain := func(name, v string) {
		if v != "" {
			p.invalid(at.Child(name), v, apivalidation.NameIsDNSSubdomain(v, false)...)
		}
	}
	subdomain("serviceAccountName", s.ServiceAccountName)
	if s.DeprecatedServiceAccount != s.ServiceAccountName {
		p.invalid(at.Child("deprecatedServiceAccount"), s.DeprecatedServiceAccount,
			fmt.Sprintf("must be the same as serviceAccountName: %q", s.ServiceAccountName))
	}
	subdomain("nodeName", s.NodeName)
	subdomain("priorityClassName", s.PriorityClassName)
	if s.RuntimeClassName != nil {
		p.invalid(at.Child("runtimeClassName"), *s.RuntimeClassName, apivalidation.NameIsDNSSubdomain(*s.RuntimeClassName, false)...)
	}
	if s.Hostname != "" {
		p.dnsLabel(at.Child("hostname"), s.Hostname)
	}
	if s.Subdomain != "" {
		p.dnsLabel(at.Child("subdomain"), s.Subdomain)
	}
	if h := s.HostnameOverride; h != nil {
		in := at.Child("hostnameOverride")
		if s.SetHostnameAsFQDN != nil && *s.SetHostnameAsFQDN {
			p.forbidden(in, "may not be specified when setHostnameAsFQDN is true")
		}
		if s.HostNetwork {
			p.forbidden(in, "may not be specified when hostNetwork is true")
		}
		if len(*h) > 64 {
			p.add(field.TooLong(in, "", 64))
		}
		p.dnsSubdomain(in, *h)
	}
}

// hostNetworkPorts: with the host's network a port cannot be mapped. A
// template may leave host ports to the pod's defaults.
func (p *problems) hostNetworkPorts(at *field.Path, s *corev1.PodSpec, isPod bool) {
	if !s.HostNetwork {
		return
	}
	for i := range s.Containers {
		for j, port := range s.Containers[i].Ports {
			if (isPod || port.HostPort != 0) && port.HostPort != port.ContainerPort {
				p.invalid(at.Child("containers").Index(i).Child("ports").Index(j).Child("hostPort"), port.HostPort,
					"must match `containerPort` when `hostNetwork` is true")
			}
		}
	}
}

func (p *problems) podSecurityContext(at *field.Path, sc *corev1.PodSecurityContext) {
	if sc == nil {
		return
	}
	p.groupID(at.Child("fsGroup"), sc.FSGroup)
	p.userID(at.Child("runAsUser"), sc.RunAsUser)
	p.groupID(at.Child("runAsGroup"), sc.RunAsGroup)
	for i := range sc.SupplementalGroups {
		p.groupID(at.Child("supplementalGroups").Index(i), &sc.SupplementalGroups[i])
	}
	supportedIfSet(p, at.Child("fsGroupChangePolicy"), sc.FSGroupChangePolicy, corev1.FSGroupChangeAlways, corev1.FSGroupChangeOnRootMismatch)
	supportedIfSet(p, at.Child("supplementalGroupsPolicy"), sc.SupplementalGroupsPolicy, corev1.SupplementalGroupsPolicyMerge, corev1.SupplementalGroupsPolicyStrict)
	p.sysctls(at.Child("sysctls"), sc.Sysctls)
}

// sysctlName is sysctl(8)'s form of a name, with dots or slashes.
var sysctlName = sync.OnceValue(func() *regexp.Regexp {
	const segment = "[a-z0-9]([-_a-z0-9]*[a-z0-9])?"
	return regexp.MustCompile("^(" + segment + `[\./])*` + segment + "$")
})

func (p *problems) sysctls(at *field.Path, list []corev1.Sysctl) {
	const longest = 253
	seen := map[string]bool{}
	for i, s := range list {
		name := at.Index(i).Child("name")
		switch {
		case s.Name == "":
			p.required(name, "")
		case len(s.Name) > longest || !sysctlName().MatchString(s.Name):
			p.invalid(name, s.Name, fmt.Sprintf("must have at most %d characters and match regex %s", longest, sysctlName()))
		case seen[s.Name]:
			p.duplicate(name, s.Name)
		}
		seen[s.Name] = true
	}
}

func (p *problems) dnsConfig(at *field.Path, s *corev1.PodSpec) {
	c := s.DNSConfig
	if s.DNSPolicy == corev1.DNSNone {
		if c == nil {
			p.required(at, fmt.Sprintf("must provide `dnsConfig` when `dnsPolicy` is %s", corev1.DNSNone))
			return
		}
		if len(c.Nameservers) == 0 {
			p.required(at.Child("nameservers"), fmt.Sprintf("must provide at least one DNS nameserver when `dnsPolicy` is %s", corev1.DNSNone))
			return
		}
	}
	if c == nil {
		return
	}
	if len(c.Nameservers) > 3 {
		p.invalid(at.Child("nameservers"), c.Nameservers, "must not have more than 3 nameservers")
	}
	for i, ns := range c.Nameservers {
		p.ip(at.Child("nameservers").Index(i), ns, nil)
	}
	searches := at.Child("searches")
	if len(c.Searches) > 32 {
		p.invalid(searches, c.Searches, "must not have more than 32 search paths")
	}
	if len(strings.Join(c.Searches, " ")) > 2048 {
		p.invalid(searches, c.Searches, "must not have more than 2048 characters (including spaces) in the search list")
	}
	for i, d := range c.Searches {
		if d != "." {
			d = strings.TrimSuffix(d, ".")
			p.invalid(searches.Index(i), d, validation.IsDNS1123SubdomainWithUnderscore(d)...)
		}
	}
	for i, o := range c.Options {
		if o.Name == "" {
			p.required(at.Child("options").Index(i), "must not be empty")
		}
	}
}

func (p *problems) schedulingGates(at *field.Path, gates []corev1.PodSchedulingGate) {
	used := names{}
	for i, g := range gates {
		p.qualifiedName(at.Index(i), g.Name)
		if used.seen(g.Name) {
			p.duplicate(at.Index(i), g.Name)
		}
	}
}

// podTemplate checks a template; the owner checks its labels against the
// selector.
func (p *problems) podTemplate(at *field.Path, t *corev1.PodTemplateSpec) {
	p.labels(at.Child("labels"), t.Labels)
	p.add(apivalidation.ValidateAnnotations(t.Annotations, at.Child("annotations"))...)
	p.podAnnotations(at.Child("annotations"), t.Annotations, &t.Spec)
	p.podSpec(at.Child("spec"), &t.Spec)
	p.hostNetworkPorts(at.Child("spec"), &t.Spec, false)
	if len(t.Spec.EphemeralContainers) > 0 {
		p.forbidden(at.Child("spec", "ephemeralContainers"), "ephemeral containers not allowed in pod template")
	}
}
