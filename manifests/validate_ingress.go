package manifests

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// annotationIngressClass is what spec.ingressClassName replaced.
const annotationIngressClass = "kubernetes.io/ingress.class"

// maxIngressController bounds spec.controller of an IngressClass.
const maxIngressController = 250

// ingress checks an Ingress; what an old one had already stays valid.
func (p *problems) ingress(ing, old *networkingv1.Ingress) {
	s := &ing.Spec
	if len(s.Rules) == 0 && s.DefaultBackend == nil {
		p.invalid(specPath, s.Rules, "either `defaultBackend` or `rules` must be specified")
	}
	if s.DefaultBackend != nil {
		p.ingressBackend(specPath.Child("defaultBackend"), s.DefaultBackend)
	}
	laxWildcards := old != nil && hasBadWildcardRule(&old.Spec)
	for i := range s.Rules {
		p.ingressRule(specPath.Child("rules").Index(i), &s.Rules[i], laxWildcards)
	}
	laxSecrets := old != nil && hasBadSecretName(&old.Spec)
	for i := range s.TLS {
		at := specPath.Child("tls").Index(i)
		for j, h := range s.TLS[i].Hosts {
			p.wildcardHost(at.Child("hosts").Index(j), h)
		}
		if !laxSecrets && s.TLS[i].SecretName != "" {
			p.invalid(at.Child("secretName"), s.TLS[i].SecretName, apivalidation.NameIsDNSSubdomain(s.TLS[i].SecretName, false)...)
		}
	}
	if s.IngressClassName != nil {
		p.dnsSubdomain(specPath.Child("ingressClassName"), *s.IngressClassName)
	}
	if old == nil {
		if v, ok := ing.Annotations[annotationIngressClass]; ok && s.IngressClassName != nil && v != *s.IngressClassName {
			p.invalid(field.NewPath("annotations").Child(annotationIngressClass), v, "must match `ingressClassName` when both are specified")
		}
	}
	p.ingressAnnotations(ing)
	p.ingressStatus(ing, old)
}

// ingressAnnotations checks those of ours, which upstream does not know.
func (p *problems) ingressAnnotations(ing *networkingv1.Ingress) {
	at := metadataPath.Child("annotations")
	if v, ok := ing.Annotations[AnnotationSSLRedirect]; ok && v != "true" && v != "false" {
		p.invalid(at.Key(AnnotationSSLRedirect), v, `must be "true" or "false"`)
	}
	if v, ok := ing.Annotations[AnnotationBackendTimeout]; ok {
		if d, err := time.ParseDuration(v); err != nil || d < time.Second || d > 24*time.Hour {
			p.invalid(at.Key(AnnotationBackendTimeout), v, "must be a duration from 1s to 24h, such as 90s")
		}
	}
}

func (p *problems) ingressStatus(ing, old *networkingv1.Ingress) {
	var had []string
	if old != nil {
		for _, i := range old.Status.LoadBalancer.Ingress {
			had = append(had, i.IP)
		}
	}
	for i, in := range ing.Status.LoadBalancer.Ingress {
		at := statusPath.Child("loadBalancer", "ingress").Index(i)
		if in.IP != "" {
			p.ip(at.Child("ip"), in.IP, had)
		}
		if in.Hostname != "" {
			p.dnsSubdomain(at.Child("hostname"), in.Hostname)
			p.notAnIP(at.Child("hostname"), in.Hostname)
		}
	}
}

func (p *problems) notAnIP(at *field.Path, host string) {
	if _, err := netip.ParseAddr(host); err == nil {
		p.invalid(at, host, "must be a DNS name, not an IP address")
	}
}

func (p *problems) wildcardHost(at *field.Path, host string) {
	if strings.Contains(host, "*") {
		p.invalid(at, host, validation.IsWildcardDNS1123Subdomain(host)...)
		return
	}
	p.dnsSubdomain(at, host)
}

func (p *problems) ingressRule(at *field.Path, r *networkingv1.IngressRule, laxWildcards bool) {
	if r.Host != "" {
		p.notAnIP(at.Child("host"), r.Host)
		p.wildcardHost(at.Child("host"), r.Host)
	}
	if r.HTTP == nil || laxWildcards && strings.Contains(r.Host, "*") {
		return
	}
	paths := at.Child("http", "paths")
	if len(r.HTTP.Paths) == 0 {
		p.required(paths, "")
	}
	for i := range r.HTTP.Paths {
		p.ingressPath(paths.Index(i), &r.HTTP.Paths[i])
	}
}

func (p *problems) ingressPath(at *field.Path, h *networkingv1.HTTPIngressPath) {
	if h.PathType == nil {
		p.required(at.Child("pathType"), "pathType must be specified")
		return
	}
	switch *h.PathType {
	case networkingv1.PathTypeExact, networkingv1.PathTypePrefix:
		if !strings.HasPrefix(h.Path, "/") {
			p.invalid(at.Child("path"), h.Path, "must be an absolute path")
		}
		for _, s := range []string{"//", "/./", "/../", "%2f", "%2F"} {
			if strings.Contains(h.Path, s) {
				p.invalid(at.Child("path"), h.Path, fmt.Sprintf("must not contain '%s'", s))
			}
		}
		for _, s := range []string{"/..", "/."} {
			if strings.HasSuffix(h.Path, s) {
				p.invalid(at.Child("path"), h.Path, fmt.Sprintf("cannot end with '%s'", s))
			}
		}
	case networkingv1.PathTypeImplementationSpecific:
		if h.Path != "" && !strings.HasPrefix(h.Path, "/") {
			p.invalid(at.Child("path"), h.Path, "must be an absolute path")
		}
	default:
		supported(p, at.Child("pathType"), *h.PathType, networkingv1.PathTypeExact, networkingv1.PathTypeImplementationSpecific, networkingv1.PathTypePrefix)
	}
	p.ingressBackend(at.Child("backend"), &h.Backend)
}

func (p *problems) ingressBackend(at *field.Path, b *networkingv1.IngressBackend) {
	switch {
	case b.Resource != nil && b.Service != nil:
		p.invalid(at, "", "cannot set both resource and service backends")
	case b.Resource != nil:
		p.objectReference(at.Child("resource"), b.Resource.APIGroup, b.Resource.Kind, b.Resource.Name)
	case b.Service != nil:
		if name := at.Child("service", "name"); b.Service.Name == "" {
			p.required(name, "")
		} else {
			p.dnsLabel(name, b.Service.Name)
		}
		port := &b.Service.Port
		switch {
		case port.Name != "" && port.Number != 0:
			p.invalid(at, "", "cannot set both port name & port number")
		case port.Name != "":
			p.invalid(at.Child("service", "port", "name"), port.Name, validation.IsValidPortName(port.Name)...)
		case port.Number != 0:
			p.portNumber(at.Child("service", "port", "number"), port.Number)
		default:
			p.required(at, "port name or number is required")
		}
	default:
		p.invalid(at, "", "resource or service backend is required")
	}
}

// objectReference checks a reference to an object of some API.
func (p *problems) objectReference(at *field.Path, group *string, kind, name string) {
	if group != nil {
		p.dnsSubdomain(at.Child("apiGroup"), *group)
	}
	for _, part := range []struct{ field, value string }{{"kind", kind}, {"name", name}} {
		if part.value == "" {
			p.required(at.Child(part.field), "")
		} else {
			p.invalid(at.Child(part.field), part.value, content.IsPathSegmentName(part.value)...)
		}
	}
}

func hasBadSecretName(s *networkingv1.IngressSpec) bool {
	for _, t := range s.TLS {
		if t.SecretName != "" && len(apivalidation.NameIsDNSSubdomain(t.SecretName, false)) > 0 {
			return true
		}
	}
	return false
}

func hasBadWildcardRule(s *networkingv1.IngressSpec) bool {
	for i := range s.Rules {
		if strings.Contains(s.Rules[i].Host, "*") {
			var q problems
			r := networkingv1.IngressRule{IngressRuleValue: s.Rules[i].IngressRuleValue}
			if q.ingressRule(nil, &r, false); len(q.list) > 0 {
				return true
			}
		}
	}
	return false
}

func (p *problems) ingressClass(c *networkingv1.IngressClass) {
	at := specPath.Child("controller")
	if len(c.Spec.Controller) > maxIngressController {
		p.add(field.TooLong(at, "", maxIngressController))
	}
	p.add(validation.IsDomainPrefixedPath(at, c.Spec.Controller)...)
	r := c.Spec.Parameters
	if r == nil {
		return
	}
	at = specPath.Child("parameters")
	p.objectReference(at, r.APIGroup, r.Kind, r.Name)
	if r.Scope == nil {
		p.required(at.Child("scope"), "")
		return
	}
	const inCluster, inNamespace = networkingv1.IngressClassParametersReferenceScopeCluster, networkingv1.IngressClassParametersReferenceScopeNamespace
	if !supported(p, at.Child("scope"), *r.Scope, inCluster, inNamespace) {
		return
	}
	switch {
	case *r.Scope == inCluster && r.Namespace != nil:
		p.forbidden(at.Child("namespace"), "`parameters.scope` is set to 'Cluster'")
	case *r.Scope == inNamespace && r.Namespace == nil:
		p.required(at.Child("namespace"), "`parameters.scope` is set to 'Namespace'")
	case *r.Scope == inNamespace:
		p.invalid(at.Child("namespace"), *r.Namespace, apivalidation.ValidateNamespaceName(*r.Namespace, false)...)
	}
}
