package printers

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// mostHosts is how many hosts of an Ingress stand in its row.
const mostHosts = 3

// addIngress registers Ingresses and their classes.
func addIngress(m map[reflect.Type]*printer) {
	add(m, []metav1.TableColumnDefinition{
		nameColumn(),
		column("Class", "The name of the IngressClass resource that should be used for additional configuration"),
		column("Hosts", "Hosts that incoming requests are matched against before the ingress rule"),
		column("Address", "Address is a list containing ingress points for the load-balancer"),
		column("Ports", "Ports of TLS configurations that open"),
		ageColumn(),
	}, func(o *networkingv1.Ingress, now time.Time) []any {
		class, ports := "<none>", "80"
		if o.Spec.IngressClassName != nil {
			class = *o.Spec.IngressClassName
		}
		if len(o.Spec.TLS) > 0 {
			ports = "80, 443"
		}
		return []any{o.Name, class, ingressHosts(o.Spec.Rules), ingressAddresses(o), ports, age(o.CreationTimestamp, now)}
	})
	add(m, []metav1.TableColumnDefinition{
		nameColumn(),
		column("Controller", "Controller that is responsible for handling this class"),
		column("Parameters", "A reference to a resource with additional parameters"),
		ageColumn(),
	}, func(o *networkingv1.IngressClass, now time.Time) []any {
		name, parameters := o.Name, "<none>"
		if o.Annotations[networkingv1.AnnotationIsDefaultIngressClass] == "true" {
			name += " (default)"
		}
		if p := o.Spec.Parameters; p != nil {
			parameters = p.Kind
			if p.APIGroup != nil {
				parameters += "." + *p.APIGroup
			}
			parameters += "/" + p.Name
		}
		return []any{name, o.Spec.Controller, parameters, age(o.CreationTimestamp, now)}
	})
}

// ingressHosts counts what it leaves out as upstream does: in rules, also
// those without a host.
func ingressHosts(rules []networkingv1.IngressRule) string {
	var list []string
	for i := range rules {
		if len(list) == mostHosts {
			return fmt.Sprintf("%s + %d more...", strings.Join(list, ","), len(rules)-mostHosts)
		}
		if rules[i].Host != "" {
			list = append(list, rules[i].Host)
		}
	}
	if len(list) == 0 {
		return "*"
	}
	return strings.Join(list, ",")
}

func ingressAddresses(o *networkingv1.Ingress) string {
	var list []string
	for _, i := range o.Status.LoadBalancer.Ingress {
		if a := cmp.Or(i.IP, i.Hostname); a != "" {
			list = append(list, a)
		}
	}
	slices.Sort(list)
	return strings.Join(slices.Compact(list), ",")
}
